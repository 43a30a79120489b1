import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from multigpu_cli.config.schema import DataConfig, ModelConfig
from multigpu_cli.data.collate import to_pair
from multigpu_cli.data.load import load_data_source
from multigpu_cli.data.source import DataSource
from multigpu_cli.errors import RequestError
from multigpu_cli.language.chat import chat
from multigpu_cli.language.chat.samples import PackedDataset, SFTDataset, pad_samples
from multigpu_cli.language.model_folder import describe_tokenizer, load_text_model
from multigpu_cli.language.prompts import PromptReader
from multigpu_cli.runtime.model_call import IGNORED
from tests.support.tiny_language_models import CHATML, make_model_folder, make_tokenizer

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

PAD = 1  # <|im_end|> of the tiny tokenizer: EOS and PAD


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"))


def make_talk(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


TALKS = [make_talk(f"What is {n}?", "x" * (n % 5 + 1)) for n in range(40)]


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def open_chat(
    place: Path, model_dir: Path, max_length: int | None = None, packing: str = "on", compile: str = "off", **args: Any
) -> DataSource:
    config = DataConfig(name="chat", dir=str(place), max_length=max_length, packing=packing, args=args)
    return load_data_source(config, 42, model=ModelConfig(dir=str(model_dir), compile=compile))


@pytest.mark.parametrize("limit", [45, 64])
@pytest.mark.parametrize(("compile", "packing"), [("off", "on"), ("off", "off"), ("default", "on"), ("default", "off")])
def test_compiled_training_batches_are_filled_up(
    compile: str, packing: str, limit: int, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packs to --max-length, other samples to a multiple of a length; evaluations, which run uncompiled, are not."""
    monkeypatch.setattr(chat, "_FILL", 50)
    source = open_chat(write(tmp_path / "a.jsonl", TALKS), model_dir, limit, packing, compile, val=0.5)
    for name, split in {"train": source.train, "val": source.val}.items():
        samples = [split[0], split[1]]  # type: ignore[index]
        longest = max(len(sample["input_ids"]) for sample in samples)
        filled = limit if packing == "on" else min(limit, -(-longest // 50) * 50)
        batch = split.collate_fn(samples)  # type: ignore[union-attr]
        width = filled if (compile, name) == ("default", "train") else longest
        assert {values.shape[1] for values in batch.values()} == {width}


def test_labels_stand_at_learned_tokens_only(tmp_path: Path, model_dir: Path) -> None:
    source = open_chat(write(tmp_path / "a.jsonl", TALKS), model_dir, packing="off", val=0)
    tokenizer, chats = make_tokenizer(), source.train
    assert isinstance(chats, SFTDataset)
    sample = chats[3]
    learned = sample["labels"] != IGNORED
    assert tokenizer.decode(sample["labels"][learned]) == "xxxx<|im_end|>"
    assert torch.equal(sample["labels"][learned], sample["input_ids"][learned])
    assert sample["position_ids"].tolist() == list(range(len(sample["input_ids"])))
    assert (chats.lengths[3], chats.learned[3]) == (len(sample["input_ids"]), int(learned.sum()))
    assert source.val is None


def test_a_batch_is_filled_up_with_what_is_never_a_target(tmp_path: Path, model_dir: Path) -> None:
    """PAD is EOS here: the model still learns EOS, and not the padding."""
    source = open_chat(write(tmp_path / "a.jsonl", TALKS), model_dir, packing="off")
    chats = source.train
    assert isinstance(chats, SFTDataset)
    samples = [chats[0], chats[1]]
    short, long = sorted(len(sample["input_ids"]) for sample in samples)
    batch = pad_samples(samples, padding=PAD)
    assert all(part.shape == (2, long) for part in batch.values())
    row = min(range(2), key=lambda n: len(samples[n]["input_ids"]))
    assert batch["input_ids"][row, short:].eq(PAD).all()
    assert batch["position_ids"][row, short:].tolist() == list(range(long - short))
    inputs, targets = to_pair(chats.collate_fn(samples), "a batch")
    assert set(inputs) == {"input_ids", "position_ids"}
    for sample, row_targets in zip(samples, targets, strict=True):
        wanted = int((sample["labels"] != IGNORED).sum())
        assert int((row_targets != IGNORED).sum()) == wanted
        assert int(row_targets[row_targets != IGNORED][-1]) == PAD, "EOS is learned"


def test_packs_hold_each_sample_once_and_change_with_the_epoch(tmp_path: Path, model_dir: Path) -> None:
    path = write(tmp_path / "a.jsonl", TALKS)
    packs = open_chat(path, model_dir, val=0).train
    chats = open_chat(path, model_dir, packing="off", val=0).train
    assert isinstance(packs, PackedDataset)
    assert isinstance(chats, SFTDataset)
    alone = sorted(chats[n]["input_ids"].tolist() for n in range(len(chats)))
    found = []
    for epoch in (0, 1, 0):
        packs.make_packs_of_epoch(epoch)
        rows = [packs[n] for n in range(len(packs))]
        assert max(len(row["input_ids"]) for row in rows) <= 64
        pieces = []
        for row in rows:
            starts = [*(row["position_ids"] == 0).nonzero().flatten().tolist(), len(row["input_ids"])]
            pieces += [row["input_ids"][a:b].tolist() for a, b in pairwise(starts)]
            assert (row["labels"][starts[:-1]] == IGNORED).all(), "nothing of one text foretells the next"
        assert sorted(pieces) == alone
        found.append([row["input_ids"].tolist() for row in rows])
    assert found[0] == found[2] != found[1]
    assert len(found[0]) == len(found[1]) == len(packs) < len(chats)


def test_a_pack_that_an_epoch_does_not_need_counts_for_nothing(tmp_path: Path, model_dir: Path) -> None:
    packs = open_chat(write(tmp_path / "a.jsonl", TALKS), model_dir).train
    assert isinstance(packs, PackedDataset)
    empty = {name: torch.zeros(0, dtype=torch.int64) for name in packs[0]}
    batch = packs.collate_fn([empty])
    assert batch["input_ids"].shape == (1, 1)
    assert batch["labels"].tolist() == [[IGNORED]]


def test_splits_by_seed_or_by_file(tmp_path: Path, model_dir: Path) -> None:
    one = write(tmp_path / "one.jsonl", TALKS)
    source = open_chat(one, model_dir, packing="off", val=0.1)
    train, val = source.train, source.val
    assert isinstance(train, SFTDataset)
    assert isinstance(val, SFTDataset)
    assert (len(train), len(val)) == (36, 4)
    assert sorted([*train.rows, *val.rows]) == list(range(40))
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, count in (("train", 9), ("test", 3)):
        write(folder / f"{name}.jsonl", TALKS[:count])
    source = open_chat(folder, model_dir, packing="off", val=0)
    assert [split and len(split) for split in (source.train, source.val, source.test)] == [9, None, 3]  # type: ignore[arg-type]


def test_an_array_and_parquet_hold_the_same_conversations(tmp_path: Path, model_dir: Path) -> None:
    lines = open_chat(write(tmp_path / "a.jsonl", TALKS), model_dir, packing="off").train
    (tmp_path / "b.json").write_text(json.dumps(TALKS, indent=2))
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow (extra arrow)")
    from pyarrow import parquet

    folder = tmp_path / "folder"
    folder.mkdir()
    table = pyarrow.Table.from_pylist(TALKS)
    for name, part in {"train-0-of-2": table[:30], "train-1-of-2": table[30:], "test-0-of-1": table[:3]}.items():
        parquet.write_table(part, folder / f"{name}.parquet", row_group_size=7)
    (folder / "dataset_infos.json").write_text("{}")
    parts = open_chat(folder, model_dir, packing="off")
    for other in (open_chat(tmp_path / "b.json", model_dir, packing="off").train, parts.train):
        assert isinstance(lines, SFTDataset)
        assert isinstance(other, SFTDataset)
        assert [other[n]["labels"].tolist() for n in range(38)] == [lines[n]["labels"].tolist() for n in range(38)]
    assert parts.test is not None
    assert len(parts.test) == 3  # type: ignore[arg-type]


def test_what_the_template_does_with_thoughts_is_a_warning(tmp_path: Path, model_dir: Path) -> None:
    """Whether the tokens are made now, or were found in the cache."""
    rows = [*TALKS, make_talk("Why?", "<think>hm</think>So.")]
    path, template = write(tmp_path / "a.jsonl", rows[::-1]), tmp_path / "t.jinja"
    template.write_text(CHATML.replace("message['content']", "message['content'].split('</think>')[-1]"))
    for _ in range(2):
        source = open_chat(path, model_dir, chat_template=str(template))
        (warning,) = source.warnings
        assert f"{path}:1: the chat template leaves the thought of message 2 out: it is not learned" in warning
    assert open_chat(path, model_dir).warnings == ()


def test_what_is_too_long_is_said_dropped_or_cut(tmp_path: Path, model_dir: Path) -> None:
    path = write(tmp_path / "a.jsonl", [*TALKS, make_talk("Long?", "y" * 40)])
    with pytest.raises(RequestError, match=r"1 of 41 samples for train are longer.*a\.jsonl:41") as raised:
        open_chat(path, model_dir, 45, val=0)
    assert "--max-length 6" in str(raised.value.remedy)
    dropped = open_chat(path, model_dir, 45, "off", val=0, overlong="drop")
    assert len(dropped.train) == 40  # type: ignore[arg-type]
    assert "1 overlong sample of train dropped" in dropped.note
    cut = open_chat(path, model_dir, 45, "off", val=0, overlong="truncate").train
    assert isinstance(cut, SFTDataset)
    assert len(cut[40]["input_ids"]) == 45
    assert PAD not in cut[40]["labels"].tolist(), "its end was cut off, and is not made up"


def test_a_model_that_names_no_longest_text_takes_max_length(tmp_path: Path) -> None:
    """Such as BLOOM, whose positions have no table."""
    tokenizer, path = make_tokenizer(), write(tmp_path / "a.jsonl", TALKS)
    tokenizer.save_pretrained(tmp_path)
    transformers.BloomConfig(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    with pytest.raises(RequestError, match="states no context length"):
        open_chat(path, tmp_path)
    assert open_chat(path, tmp_path, 2048).input_shape == (2048,)


def test_of_a_tokenizer_that_cuts_the_same_is_recorded_before_its_first_text_and_later(tmp_path: Path) -> None:
    """Its tokenizer.json may say so, and it forgets that with the first text that is not to be cut."""
    folder, tokenizer = make_model_folder(tmp_path / "model"), make_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(8)
    tokenizer.save_pretrained(folder)
    source = open_chat(write(tmp_path / "a.jsonl", TALKS), folder)
    packs = source.train
    assert isinstance(packs, PackedDataset)
    assert packs.chats.lengths.min() > 8
    assert source.codec.record == describe_tokenizer(load_text_model(folder).tokenizer, None)


def test_the_template_is_given_values_of_the_user(tmp_path: Path, model_dir: Path) -> None:
    path = write(tmp_path / "a.jsonl", TALKS)
    text = CHATML.replace("{{ message['content'] }}", "{% if shout is defined and shout %}!{% endif %}\\g<0>")
    (tmp_path / "template.jinja").write_text(text.replace("\\g<0>", "{{ message['content'] }}"))
    args: dict[str, Any] = {"chat_template": "template.jinja"}
    plain, off, on = (
        open_chat(path, model_dir, packing="off", **args | more)
        for more in ({}, {"template_args": {"shout": False}}, {"template_args": {"shout": True}})
    )
    first, quiet, loud = (source.train[0]["input_ids"] for source in (plain, off, on))
    assert torch.equal(first, quiet)
    assert len(loud) == len(quiet) + 2, "a mark in each message"
    assert len({source.signature() for source in (plain, off, on)}) == 3
    model, template = load_text_model(model_dir), (tmp_path / "template.jinja").read_text()
    question = model.tokenizer.decode(loud).split("!")[1].split("<|im_end|>")[0]
    asked = PromptReader(model, template, 64, {"shout": True}).read_text(question)
    assert loud[: len(asked.tokens)].tolist() == asked.tokens
    for values, message in (
        ("on", "is not a mapping"),
        ({"tools": []}, "tools is set by the data"),
        ({"messages": []}, "messages"),
    ):
        with pytest.raises(RequestError, match=rf"template_args: .*{message}"):
            open_chat(path, model_dir, template_args=values)


def make_folder_without_eos(folder: Path, **changes: Any) -> Path:
    """A copy of the tiny model with other entries in its tokenizer_config.json."""
    made = make_model_folder(folder)
    file = made / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return made


def test_what_makes_no_training_is_refused(tmp_path: Path, model_dir: Path) -> None:
    good = write(tmp_path / "good.jsonl", TALKS)
    unanswered = write(tmp_path / "b.jsonl", [*TALKS, {"messages": [{"role": "user", "content": "?"}]}])
    late = write(tmp_path / "c.jsonl", [*TALKS, make_talk("Why? " * 9, "y")])
    other = make_folder_without_eos(tmp_path / "other", eos_token="<|pad|>")
    (other / "generation_config.json").unlink()
    large = make_model_folder(tmp_path / "large", vocab_size=200)
    cases: list[tuple[Path, Path, int | None, dict[str, Any], str]] = [
        (unanswered, model_dir, None, {}, r"of 1 sample no token is trained .*b\.jsonl:41"),
        (late, model_dir, 45, {"overlong": "truncate"}, r"c\.jsonl:41.* is cut off before"),
        (good, other, None, {}, r"ends with 'Ċ', and generation with <.pad.>"),
        (good, large, None, {}, "the model's embedding 200"),
        (good, model_dir, 65, {}, "context length is 64"),
        (good, model_dir, None, {"format": "chatml"}, "data.args.format"),
        (good, model_dir, None, {"format": "alpaca"}, r"good\.jsonl:\d+ has no 'instruction'"),
        (write(tmp_path / "d.jsonl", []), model_dir, None, {}, "is empty"),
        (tmp_path / "gone.jsonl", model_dir, None, {}, "gone.jsonl: there is no such file or folder"),
        (tmp_path, model_dir, None, {}, "b.jsonl, c.jsonl"),
        (write(tmp_path / "e.jsonl", TALKS[:5]), model_dir, None, {"val": 0.05}, r"5 records in .*e\.jsonl leave none"),
    ]
    for path, folder, length, args, said in cases:
        with pytest.raises(RequestError, match=said) as raised:
            open_chat(path, folder, length, **{"val": 0, **args})
    assert "--set data.val=0" in str(raised.value.remedy)
