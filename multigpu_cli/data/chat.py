"""Conversations, or plain text, from .jsonl files, for fine-tuning a language model."""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from multigpu_cli.data.chat_checks import check_samples
from multigpu_cli.data.chat_samples import Chats, Packs
from multigpu_cli.data.chat_tokens import LOSS_ON, ChatEncoder, ChatTokens
from multigpu_cli.data.conversations import FORMS, PREFERENCE, detect_form, read_conversation
from multigpu_cli.data.data_source import DataSource
from multigpu_cli.data.json_lines import JsonLines
from multigpu_cli.data.locate_dataset_files import locate_other_file
from multigpu_cli.data.preference_pairs import Answers, Pairs, check_differences, encode_pair
from multigpu_cli.data.split import split_by_sample
from multigpu_cli.data.vocabulary import Subwords
from multigpu_cli.errors import RequestError, pluralize
from multigpu_cli.runtime.model_folder import (
    find_model_folder,
    hash_tokenizer,
    load_text_model,
)

_SPLITS = ("train", "val", "test")
_OVERLONG = ("stop", "drop", "truncate")
_LAYOUT = "a .jsonl file, or a folder with train.jsonl and perhaps val.jsonl and test.jsonl"
_UNLIMITED = 10**9  # what tokenizers say that know no longest text is above


class _Files(NamedTuple):
    """The records of each split; only `train` where the file is to be divided."""

    train: JsonLines
    val: JsonLines | None = None
    test: JsonLines | None = None


def load(
    data_dir: str | None,
    seed: int,
    model_dir: str | None = None,
    max_length: int | None = None,
    packing: str = "auto",
    format: str = "auto",
    chat_template: str | None = None,
    loss_on: str | None = None,
    overlong: str = "stop",
    val: float = 0.05,
    file: str | None = None,
) -> DataSource:
    """Conversations, or plain text, for --model pretrained.

    Args:
        data_dir: a .jsonl file, or a folder with train.jsonl and perhaps val.jsonl and test.jsonl.
        seed: draws the validation split and the packs.
        model_dir: the model, whose tokenizer and chat template are used.
        max_length: tokens of a sample or pack (default: as many as the model knows places for).
        packing: on or off: several samples in a row, which do not see each other; auto: on, but not for preferences.
            Evaluations do not pack.
        format: preference, messages, sharegpt, alpaca, completion, text, or auto: by the fields of the first record.
        chat_template: file of a template in place of the model's own.
        loss_on: assistant, completion or all (default: the assistant's messages, completions, all of a plain text).
        overlong: stop, drop or truncate: samples of more than max_length tokens.
        val: share for validation, drawn by seed; without effect where there is a val.jsonl.
        file: the .jsonl file in data_dir, where there are several.

    Raises:
        RequestError: a record that is none, a template that does not fit, samples of which nothing is learned.
    """
    _check_choices(format, loss_on, overlong, val)
    files = _find_files(data_dir, file)
    config, tokenizer, ends = load_text_model(find_model_folder(model_dir))
    template = None if chat_template is None else _read_template(data_dir, chat_template)
    form = detect_form(files.train[0], files.train.describe(0)) if format == "auto" else format
    _check_tokenizer(tokenizer, config, ends, max_length)
    limit = max_length or _find_limit(config, tokenizer)
    learns, paired = loss_on or FORMS[form].loss_on, form == PREFERENCE
    if paired:
        _check_fits_pairs(packing, learns)
    encoder = ChatEncoder(tokenizer, template, learns, ends)
    padding = next(token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if token is not None)
    splits: dict[str, Chats] = {
        name: Answers(records, rows, _encode_pairs(records, rows, encoder), limit, padding)
        if paired
        else Chats(records, rows, _encode(records, rows, form, encoder), limit, padding)
        for name, (records, rows) in _divide(files, val, seed).items()
    }
    notes = [check_samples(name, chats, overlong, learns, ends, tokenizer) for name, chats in splits.items()]
    packs = Packs(splits["train"], seed) if packing != "off" and not paired else None
    pairs = {name: Pairs(answers) for name, answers in splits.items() if isinstance(answers, Answers)}
    samples: dict[str, Dataset[Any]] = {**splits, **pairs}
    return DataSource(
        train=packs or samples["train"],
        val=samples.get("val"),
        test=samples.get("test"),
        input_shape=(limit,),
        num_classes=config.get_text_config().vocab_size,
        transform_signature=f"{hash_tokenizer(tokenizer, template)} {learns} {limit}",
        note="; ".join(filter(None, [_describe(form, learns, splits["train"], packs), *notes])) + "; ",
        vocabulary=Subwords(tokenizer.backend_tokenizer.to_str()),
        packed=packs is not None,
        paired=paired,
        warnings=tuple(chain.from_iterable(check_differences(name, part) for name, part in pairs.items())),
        model="pretrained",
        task="dpo" if paired else "language-model",
    )


def _encode(records: JsonLines, rows: Sequence[int], form: str, encoder: ChatEncoder) -> Iterator[ChatTokens]:
    for row in rows:
        place = records.describe(row)
        yield encoder.encode(read_conversation(records[row], form, place), place)


def _encode_pairs(
    records: JsonLines, rows: Sequence[int], encoder: ChatEncoder
) -> Iterator[tuple[ChatTokens, ChatTokens]]:
    for row in rows:
        place = records.describe(row)
        yield encode_pair(encoder, read_conversation(records[row], PREFERENCE, place), place)


def _describe(form: str, learns: str, train: Chats, packs: Packs | None) -> str:
    tokens = sum(min(length, train.limit) for length in train.lengths)
    text = (
        f"{pluralize(len(train), train.noun)} ({form}) of {tokens:,} tokens; learned: {learns}, {sum(train.learned):,}"
    )
    if packs is None:
        return text
    filled = tokens / (len(packs) * packs.limit)
    return f"{text}; packs of at most {packs.limit} tokens, {100 * filled:.1f} % full"


def _check_fits_pairs(packing: str, learns: str) -> None:
    """Refuse settings that preferences can't follow."""
    if packing == "on":
        raise RequestError(
            "--packing on: a chosen and a rejected answer are a pair, and are not packed", remedy="leave out --packing"
        )
    if learns == "all":
        raise RequestError(
            "data.args.loss_on=all: of preferences the answers are compared, and not their common prompt",
            remedy="leave it out, or data.args.loss_on=completion: the last answer only",
        )


def _find_files(data_dir: str | None, file: str | None) -> _Files:
    if data_dir is None:
        raise RequestError("--data chat needs --data-dir", remedy=_LAYOUT)
    place = Path(data_dir)
    if place.is_dir():
        names = sorted(path.name for path in place.glob("*.jsonl"))
        if file is None and "train.jsonl" in names:
            found = {name: JsonLines(place / f"{name}.jsonl") for name in _SPLITS if f"{name}.jsonl" in names}
            return _check_records(_Files(**found))
        if file is None and len(names) != 1:
            raise RequestError(
                f"--data-dir {data_dir} holds {', '.join(names) or 'no .jsonl file'}",
                remedy=f"{_LAYOUT}{'; or --set data.file=' + names[0] if names else ''}",
            )
        place = locate_other_file("chat", place, file or names[0])
    return _check_records(_Files(JsonLines(place)))


def _check_records(files: _Files) -> _Files:
    for records in files:
        if records is not None and not len(records):
            raise RequestError(f"--data chat: {records.path} is empty", remedy="one JSON object per line")
    return files


def _divide(files: _Files, val: float, seed: int) -> dict[str, tuple[JsonLines, list[int]]]:
    """The records of each split, as numbers of lines in a file."""
    every = range(len(files.train))
    if files.val is None and val > 0:
        train, held_out = split_by_sample(len(every), (val,), seed)
        found = {
            "train": (files.train, train.sort().values.tolist()),
            "val": (files.train, held_out.sort().values.tolist()),
        }
    else:
        found = {"train": (files.train, list(every))}
    more = {name: records for name, records in zip(_SPLITS[1:], files[1:], strict=True) if records is not None}
    return found | {name: (records, list(range(len(records)))) for name, records in more.items()}


def _check_tokenizer(tokenizer: Any, config: Any, ends: tuple[int, ...], asked: int | None) -> None:
    rows = config.get_text_config().vocab_size
    if len(tokenizer) > rows:
        raise RequestError(
            f"--model-dir: its tokenizer has {len(tokenizer)} tokens, and the model's embedding {rows}",
            remedy="the tokenizer of this model; or model.resize_token_embeddings(…) and save_pretrained(…)",
        )
    if not ends:
        raise RequestError(
            "--model-dir: its tokenizer has no EOS token, so that nothing would ever end",
            remedy="eos_token in tokenizer_config.json",
        )
    if asked and asked > (places := _find_limit(config, tokenizer)):
        raise RequestError(
            f"--max-length {asked}: the model knows {places} places", remedy=f"--max-length {places}, or less"
        )


def _find_limit(config: Any, tokenizer: Any) -> int:
    """The most tokens that model and tokenizer take."""
    text = config.get_text_config()
    places = getattr(text, "max_position_embeddings", None) or _UNLIMITED
    limit = min(int(places), int(tokenizer.model_max_length))
    if limit >= _UNLIMITED:
        raise RequestError("--max-length: the model names no longest text", remedy="--max-length 2048, say")
    return limit


def _read_template(data_dir: str | None, file: str) -> str:
    return locate_other_file("chat", Path(str(data_dir)), file).read_text()


def _check_choices(format: str, loss_on: str | None, overlong: str, val: float) -> None:
    rules: list[tuple[str, Any, bool, str]] = [
        ("format", format, format in ("auto", *FORMS), " or ".join(("auto", *FORMS))),
        ("loss_on", loss_on, loss_on is None or loss_on in LOSS_ON, " or ".join(LOSS_ON)),
        ("overlong", overlong, overlong in _OVERLONG, " or ".join(_OVERLONG)),
        ("val", val, isinstance(val, int | float) and 0 <= val < 1, "a share from 0 to below 1"),
    ]
    for name, value, holds, right in rules:
        if not holds:
            raise RequestError(f"data.args.{name}: {value!r}", remedy=right)
