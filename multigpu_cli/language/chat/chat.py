"""Conversations, or plain text, from JSON or Parquet files, for fine-tuning a language model."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from torch import Tensor

from multigpu_cli.capabilities import FILES
from multigpu_cli.config.types import choice, number
from multigpu_cli.data.files import Records, find_part_files, locate_data, locate_other_file, open_records
from multigpu_cli.data.order import split_by_sample
from multigpu_cli.data.source import SPLITS, DataSource
from multigpu_cli.errors import RequestError, pluralize
from multigpu_cli.language.chat import conversations, samples
from multigpu_cli.language.chat import encoder as chat_tokens
from multigpu_cli.language.chat.conversations import FORMS, PREFERENCE, detect_form, read_conversation
from multigpu_cli.language.chat.encoder import ChatEncoder, ChatTokens, check_template_values
from multigpu_cli.language.chat.records import TokenFile, open_tokens
from multigpu_cli.language.chat.samples import (
    AnswerDataset,
    PackedDataset,
    PreferenceDataset,
    SFTDataset,
    check_differences,
    encode_pair,
    pad_samples,
)
from multigpu_cli.language.model_folder import (
    TextModel,
    describe_tokenizer,
    find_model_folder,
    find_places,
    load_text_model,
)
from multigpu_cli.language.text import Subwords
from multigpu_cli.runtime.model_call import IGNORED

_PROBED = 8  # records
_FILL = 128  # tokens, to a multiple of which compiled code gets samples; masks then suit the kernels of attention
_UNLIMITED = 10**9  # what tokenizers say that know no longest text is above


def load(
    data_dir: str | None,
    seed: int,
    model_dir: str | None = None,
    max_length: int | None = None,
    packing: str = "on",
    compiled: bool = False,
    format: Annotated[str, choice("auto", *FORMS)] = "auto",
    chat_template: str | None = None,
    template_args: dict[str, Any] | None = None,
    loss_on: Annotated[str | None, choice("assistant", "completion", "all")] = None,
    overlong: Annotated[str, choice("stop", "drop", "truncate")] = "stop",
    val: Annotated[float, number(0, 1, below=True)] = 0.05,
    file: str | None = None,
) -> DataSource:
    """Conversations, or plain text, for --model pretrained.

    Args:
        data_dir: a .jsonl, .json or .parquet file, or a folder with one for train and perhaps for val and test.
        model_dir: the model, whose tokenizer and chat template are used.
        max_length: tokens of a sample or pack (default: as many as the model knows places for).
        packing: on or off: several samples in a row, in training alone; pairs of preferences never share one.
        compiled: fill up training batches to few lengths: packs to max_length, other samples to multiples of 128.
        format: preference, messages, sharegpt, alpaca, completion, text, or auto: by the fields of the first record.
        chat_template: file of a template in place of the model's own.
        template_args: what the chat template is given beside the messages, such as {enable_thinking: false}.
        loss_on: assistant, completion or all (default: the assistant's messages, completions, all of a plain text).
        overlong: stop, drop or truncate: samples of more than max_length tokens.
        val: share for validation, drawn by seed; without effect where there are files for it.
        file: the file in data_dir, where there are several.
    """
    files, text = find_files(data_dir, file), load_text_model(find_model_folder(model_dir))
    form = detect_form(files["train"][0], files["train"].describe(0)) if format == "auto" else format
    limit, (learns, paired) = _find_limit(text, max_length), _choose_loss(form, loss_on)
    encoder, record, identity = _make_encoder(text, _read_template(data_dir, chat_template), template_args, learns)
    tokens = partial(open_record_tokens, form=form, encoder=encoder, conditions=(learns, text.ends, identity))
    splits = _open_splits(divide_files(files, val, seed), tokens, paired, limit, _find_padding(text))
    notes = [check_samples(name, part, overlong, learns, text) for name, part in splits.items()]
    is_packed = packing == "on" and not paired
    if compiled:  # torch compiles for each length, and gives up after eight of them; packs take this function over
        splits["train"].collate_fn = _pad_to_few_lengths(text, limit if is_packed else _FILL, limit)
    packs = PackedDataset(splits["train"], seed) if is_packed else None
    pairs = {name: PreferenceDataset(part) for name, part in splits.items() if isinstance(part, AnswerDataset)}
    notes.insert(0, _describe(form, learns, splits["train"], packs))
    return DataSource(
        **(splits | pairs | ({"train": packs} if packs else {})),  # type: ignore[arg-type]
        input_shape=(limit,),
        num_classes=text.config.get_text_config().vocab_size,
        transform_signature=f"{identity} {learns} {limit}",
        note="".join(f"{each}; " for each in notes if each),
        codec=Subwords(text.tokenizer.backend_tokenizer.to_str(), record),
        noun="packs" if packs else "pairs" if paired else "samples",
        warnings=tuple(_find_warnings(files["train"], form, encoder, pairs)),
        model="pretrained",
        task="dpo" if paired else "language-model",
    )


def _read_template(data_dir: str | None, chat_template: str | None) -> str | None:
    """Read the file of a chat template, which is next to the data; return None if no file is named."""
    if chat_template is None:
        return None
    return locate_other_file("chat", Path(str(data_dir)), chat_template).read_text()


def _find_padding(text: TextModel) -> int:
    """Return the token that fills rows up; no loss is computed on it, so any token will do."""
    candidates = text.tokenizer.pad_token_id, text.tokenizer.eos_token_id, 0
    return next(token for token in candidates if token is not None)


def _pad_to_few_lengths(text: TextModel, multiple: int, limit: int) -> partial[dict[str, Tensor]]:
    """Return a collate function that fills rows up to a multiple of tokens, and to at most `limit`."""
    return partial(pad_samples, padding=_find_padding(text), multiple=multiple, limit=limit)


def _open_splits(
    parts: Mapping[str, tuple[Records, np.ndarray]],
    open_tokens: Callable[[Records], TokenFile],
    paired: bool,
    limit: int,
    padding: int,
) -> dict[str, SFTDataset]:
    """The samples of each split; a file that is divided is opened once."""
    tokens = {records: open_tokens(records) for records in dict.fromkeys(records for records, _ in parts.values())}
    kind = AnswerDataset if paired else SFTDataset
    return {name: kind(records, tokens[records], rows, limit, padding) for name, (records, rows) in parts.items()}


def _make_encoder(
    text: TextModel, template: str | None, values: dict[str, Any] | None, learns: str
) -> tuple[ChatEncoder, dict[str, str], str]:
    """What makes tokens, what a checkpoint records of that, and a checksum of all that they depend on."""
    _check_tokenizer(text)
    if values is not None:
        check_template_values(text.tokenizer, values)
    record = describe_tokenizer(text.tokenizer, template)
    identity = sha256(repr(_sort((record, values))).encode()).hexdigest()
    return ChatEncoder(text.tokenizer, template, learns, text.ends, values), record, identity


def _find_warnings(
    records: Records, form: str, encoder: ChatEncoder, pairs: Mapping[str, PreferenceDataset]
) -> Iterator[str]:
    """What the chat template does otherwise than one expects, with answers of the first records; pairs of the same."""
    encoder.notes.clear()  # of all records, where they were not in the cache
    for row in range(min(_PROBED, len(records))):
        place = records.describe(row)
        encoder.encode(read_conversation(records[row], form, place), place)
    yield from encoder.notes.values()
    for name, part in pairs.items():
        yield from check_differences(name, part)


def _sort(values: Any) -> Any:
    """The same for mappings that differ in the order of their names only."""
    if isinstance(values, dict):
        return sorted((name, _sort(value)) for name, value in values.items())
    return [_sort(each) for each in values] if isinstance(values, list | tuple) else values


def _describe(form: str, learns: str, train: SFTDataset, packs: PackedDataset | None) -> str:
    tokens = int(np.minimum(train.lengths, train.limit).sum(dtype=np.int64))
    learned = int(train.learned.sum(dtype=np.int64))
    text = f"{pluralize(len(train), train.noun)} ({form}) of {tokens:,} tokens; learned: {learns}, {learned:,}"
    if packs is not None:
        filled = tokens / (len(packs) * packs.limit)
        text += f"; packs of at most {packs.limit} tokens, {100 * filled:.1f} % full"
    return "; ".join(filter(None, (text, train.own_file_because)))


def _choose_loss(form: str, loss_on: str | None) -> tuple[str, bool]:
    """What is learned, and whether records are preferences, which can't follow all settings."""
    learns = loss_on or FORMS[form].loss_on
    if form != PREFERENCE:
        return learns, False
    if learns == "all":
        problem = "data.args.loss_on=all: preferences compare the answers, not their prompt"
        raise RequestError(problem, remedy="leave it out, or data.args.loss_on=completion: the last answer only")
    return learns, True


def _check_tokenizer(text: TextModel) -> None:
    rows = text.config.get_text_config().vocab_size
    if len(text.tokenizer) > rows:
        raise RequestError(
            f"--model-dir: its tokenizer has {len(text.tokenizer)} tokens, and the model's embedding {rows}",
            remedy="the tokenizer of this model; or model.resize_token_embeddings(…) and save_pretrained(…)",
        )
    if not text.ends:
        problem = "--model-dir: its tokenizer has no EOS token, so generation would never stop"
        raise RequestError(problem, remedy="eos_token in tokenizer_config.json")


def _find_limit(text: TextModel, asked: int | None) -> int:
    """Tokens of a sample at most: --max-length, or as many as model and tokenizer take."""
    limit = min(find_places(text.config) or _UNLIMITED, int(text.tokenizer.model_max_length))
    if asked is None and limit >= _UNLIMITED:
        raise RequestError("--max-length: the model states no context length", remedy="for example --max-length 2048")
    if asked is not None and asked > limit:
        raise RequestError(
            f"--max-length {asked}: the model's context length is {limit}", remedy=f"--max-length {limit}, or less"
        )
    return asked or limit


_LAYOUT = (
    "a .jsonl file, or a folder with train.jsonl and perhaps val.jsonl and test.jsonl; datasets' "
    "to_json('train.jsonl') writes one"
)


def find_files(data_dir: str | None, file: str | None) -> dict[str, Records]:
    """The files of the splits at --data-dir, none of them empty; only `train` where the file is to be divided."""
    place = locate_data("chat", data_dir, _LAYOUT)
    paths = {"train": [place]}
    if place.is_dir():
        ending = next((each for each in FILES["chat"] if any(place.glob(f"[!.]*{each}"))), FILES["chat"][0])
        names = sorted(path.name for path in place.glob(f"[!.]*{ending}"))
        if file is None and ending == ".parquet":
            paths = find_part_files("chat", data_dir, (ending,), _LAYOUT)
        elif file is None and f"train{ending}" in names:
            paths = {name: [place / f"{name}{ending}"] for name in SPLITS if f"{name}{ending}" in names}
        elif file is None and len(names) != 1:
            problem = f"--data-dir {data_dir} holds {', '.join(names) or 'no .jsonl file'}"
            raise RequestError(problem, remedy=f"{_LAYOUT}{'; or --set data.file=' + names[0] if names else ''}")
        else:
            paths = {"train": [locate_other_file("chat", place, file or names[0])]}
    files = {name: open_records(each) for name, each in paths.items()}
    for records in files.values():
        if not len(records):
            raise RequestError(f"--data chat: {records.path} is empty", remedy="one record a line, or a row")
    return files


def divide_files(files: Mapping[str, Records], val: float, seed: int) -> dict[str, tuple[Records, np.ndarray]]:
    """The records of each split, as numbers of records in a file."""
    found = {name: (records, np.arange(len(records))) for name, records in files.items()}
    if "val" not in files and val > 0:
        records = files["train"]
        if not 0 < round(val * len(records)) < len(records):
            raise RequestError(
                f"--data chat: {pluralize(len(records), 'record')} in {records.path} leave none for a split of "
                f"data.val={val:g}",
                remedy="--set data.val=0, to train without validation; or a folder with train.jsonl and val.jsonl",
            )
        train, held_out = (part.sort().values.numpy() for part in split_by_sample(len(records), (val,), seed))
        found |= {"train": (records, train), "val": (records, held_out)}
    return {name: found[name] for name in SPLITS if name in found}


def check_samples(split: str, chats: SFTDataset, overlong: str, learns: str, text: TextModel) -> str:
    """Drop or cut what is too long, refuse samples of which nothing is learned or which never end; returns a note."""
    note = _apply_length_limit(split, chats, overlong)
    _check_learned(chats, learns)
    _check_ends(chats, text.ends, text.tokenizer)
    return note


def _apply_length_limit(split: str, chats: SFTDataset, overlong: str) -> str:
    """Drop or cut what is too long, and say so; RequestError with data.args.overlong=stop, or where nothing is left."""
    beyond = int((chats.lengths > chats.limit).sum())
    if not beyond:
        return ""
    longest = int(chats.lengths.argmax())
    if overlong == "stop":
        raise RequestError(
            f"--max-length {chats.limit}: {beyond} of {pluralize(len(chats), chats.noun)} for {split} are longer, "
            f"the longest has {chats.lengths[longest]} tokens ({chats.describe(longest)})",
            remedy="--set data.args.overlong=drop or truncate; or, if the model's context allows, "
            f"--max-length {chats.lengths[longest]}",
        )
    if overlong == "drop":
        chats.select(np.flatnonzero(chats.lengths <= chats.limit))
        if not len(chats):
            raise RequestError(
                f"--max-length {chats.limit}: no {chats.noun} for {split} is that short", remedy="a larger one"
            )
    return f"{pluralize(beyond, f'overlong {chats.noun}')} of {split} {'dropped' if overlong == 'drop' else 'cut'}"


def _check_learned(chats: SFTDataset, learns: str) -> None:
    """Refuse samples of which nothing is learned: they would only cost time, and are rarely meant."""
    without = np.flatnonzero(chats.learned == 0)
    if not len(without):
        return
    first = int(without[0])
    if chats.lengths[first] > chats.limit:
        raise RequestError(
            f"--max-length {chats.limit}: of {pluralize(len(without), chats.noun)} no token is trained; the first "
            f"({chats.describe(first)}) is cut off before what the model is to say",
            remedy="a larger --max-length, or --set data.args.overlong=drop",
        )
    raise RequestError(
        f"--data chat: of {pluralize(len(without), chats.noun)} no token is trained with data.loss_on={learns}; the "
        f"first is {chats.describe(first)}",
        remedy="records with an answer, or another data.loss_on",
    )


def _check_ends(chats: SFTDataset, ends: tuple[int, ...], tokenizer: Any) -> None:
    """Refuse where the model would never learn to stop, or begins twice; the first sample stands for all."""
    sample = chats[0]
    ids, labels = sample["input_ids"], sample["labels"]
    if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        problem = f"--data chat: {chats.describe(0)} begins with {tokenizer.bos_token!r} twice"
        raise RequestError(problem, remedy="a text or a chat template without it")
    if chats.lengths[0] <= chats.limit and not np.isin(labels.numpy(), ends).any():
        last = tokenizer.convert_ids_to_tokens(int(labels[labels != IGNORED][-1]))
        names = ", ".join(tokenizer.convert_ids_to_tokens(list(ends)))
        raise RequestError(
            f"--data chat: what is learned of {chats.describe(0)} ends with {last!r}, and generation with {names}: "
            "the model would never learn to stop",
            remedy="the eos_token that the chat template writes, in tokenizer_config.json or generation_config.json",
        )


_CODE = (chat_tokens, conversations, samples)
_LIBRARIES = ("transformers", "tokenizers", "jinja2")


def open_record_tokens(records: Records, form: str, encoder: ChatEncoder, conditions: object) -> TokenFile:
    """The tokens of all records, in a file below Hugging Face's cache; a preference is two samples.

    `conditions` is what they depend on, beside file, form, code and libraries.
    """
    from huggingface_hub.constants import HF_HOME  # late: transformers has loaded it

    def encode(row: int) -> Sequence[ChatTokens]:
        place = records.describe(row)
        conversation = read_conversation(records[row], form, place)
        return encode_pair(encoder, conversation, place) if paired else (encoder.encode(conversation, place),)

    paired = form == PREFERENCE
    code, versions = [inspect.getsource(module) for module in _CODE], [version(library) for library in _LIBRARIES]
    key = sha256(repr((records.digest, form, conditions, code, versions)).encode()).hexdigest()
    return open_tokens(Path(HF_HOME, "multigpu"), key, len(records), encode, AnswerDataset.width if paired else 1)
