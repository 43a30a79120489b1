import json
from pathlib import Path
from typing import Any

import pytest
import torch

from multigpu_cli.config.schema import DataConfig, ModelConfig
from multigpu_cli.data.collate import to_pair
from multigpu_cli.data.load import load_data_source
from multigpu_cli.data.source import DataSource
from multigpu_cli.errors import RequestError
from multigpu_cli.language.chat.conversations import Conversation
from multigpu_cli.language.chat.encoder import ChatEncoder
from multigpu_cli.language.chat.samples import PreferenceDataset, encode_pair
from multigpu_cli.runtime.model_call import IGNORED
from tests.support.tiny_language_models import make_model_folder, make_tokenizer

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

PAD = 1  # <|im_end|> of the tiny tokenizer: EOS and PAD


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"))


def make_preference(question: str, chosen: str, rejected: str) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": question}], "chosen": chosen, "rejected": rejected}


ROWS = [make_preference(f"What is {n}?", "x" * (n % 3 + 1), "y" * (n % 5 + 1)) for n in range(20)]


def open_pairs(
    path: Path,
    records: list[dict[str, Any]],
    model_dir: Path,
    length: int | None = None,
    packing: str = "on",
    **a: Any,
) -> DataSource:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = DataConfig(name="chat", dir=str(path), max_length=length, packing=packing, args={"val": 0} | a)
    return load_data_source(config, 42, model=ModelConfig(dir=str(model_dir)))


def decode_learned(sample: dict[str, torch.Tensor]) -> str:
    return str(make_tokenizer().decode(sample["labels"][sample["labels"] != IGNORED]))


def test_a_pair_is_one_sample_and_a_batch_holds_both_answers(tmp_path: Path, model_dir: Path) -> None:
    source = open_pairs(tmp_path / "a.jsonl", ROWS, model_dir, val=0.1)
    assert (source.task, source.model, source.noun) == ("dpo", "pretrained", "pairs")
    assert source.note.startswith("36 answers (preference) of ")
    pairs = source.train
    assert isinstance(pairs, PreferenceDataset)
    assert isinstance(source.val, PreferenceDataset)
    assert (len(pairs), len(source.val)) == (18, 2)
    samples = [pairs[0], pairs[3]]
    for (chosen, rejected), index in zip(samples, (0, 3), strict=True):
        row = ROWS[pairs.answers.rows[2 * index]]
        assert decode_learned(chosen) == f"{row['chosen']}<|im_end|>"
        assert decode_learned(rejected) == f"{row['rejected']}<|im_end|>"
    inputs, targets = to_pair(pairs.collate_fn(samples), "a batch")
    longest = max(len(side["input_ids"]) for pair in samples for side in pair)
    assert targets.shape == inputs["input_ids"].shape == inputs["position_ids"].shape == (2, 2, longest)
    for number, pair in enumerate(samples):
        for side, sample in enumerate(pair):
            size = len(sample["input_ids"])
            assert torch.equal(inputs["input_ids"][number, side, :size], sample["input_ids"])
            assert torch.equal(targets[number, side, : size - 1], sample["labels"][1:])
            assert (targets[number, side, size - 1 :] == IGNORED).all()


def test_only_answers_after_the_common_beginning_are_learned(tmp_path: Path, model_dir: Path) -> None:
    begun = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3?"},
    ]
    record = {
        side: [*begun, {"role": "assistant", "content": said}] for side, said in (("chosen", "4"), ("rejected", "5"))
    }
    chosen, rejected = open_pairs(tmp_path / "a.jsonl", [record], model_dir, 64).train[0]
    assert (decode_learned(chosen), decode_learned(rejected)) == ("4<|im_end|>", "5<|im_end|>")


def test_what_is_learned_begins_where_tokens_differ() -> None:
    """ " of" is one token of the tiny tokenizer, and " over" is four: what they share is part of both answers."""
    tokenizer = make_tokenizer()
    encoder = ChatEncoder(tokenizer, None, "assistant", (PAD,))
    prompt = "The quick brown fox o"
    other = Conversation(prompt=prompt, completion="ver")
    pair = encode_pair(encoder, Conversation(prompt=prompt, completion="f", rejected=other), "a.jsonl:1")
    said = [tokenizer.decode([token for token, learned in zip(*tokens, strict=True) if learned]) for tokens in pair]
    assert said == [" of<|im_end|>", " over<|im_end|>"]


def test_an_overlong_answer_is_named_dropped_with_its_pair_or_cut_alone(tmp_path: Path, model_dir: Path) -> None:
    path, records = tmp_path / "a.jsonl", [*ROWS, make_preference("Why?", "x", "y" * 50)]
    with pytest.raises(RequestError, match=r"1 of 42 answers for train are longer.*a\.jsonl:21, rejected"):
        open_pairs(path, records, model_dir, 45)
    dropped = open_pairs(path, records, model_dir, 45, overlong="drop")
    assert len(dropped.train) == 20  # type: ignore[arg-type]
    assert "1 overlong answer of train dropped" in dropped.note
    cut = open_pairs(path, records, model_dir, 45, overlong="truncate").train
    assert isinstance(cut, PreferenceDataset)
    whole = open_pairs(path, records, model_dir, 64, overlong="truncate").train[20]
    assert [len(side["input_ids"]) for side in cut[20]] == [len(whole[0]["input_ids"]), 45]
    assert [PAD in side["labels"].tolist() for side in cut[20]] == [True, False]


def test_pairs_of_which_nothing_is_learned_are_refused_or_told(tmp_path: Path, model_dir: Path) -> None:
    same = make_preference("Why?", "x", "x")
    found = open_pairs(tmp_path / "a.jsonl", [*ROWS, same, same], model_dir)
    assert len(found.warnings) == 1
    assert "the same in 2 of 22 pairs for train" in found.warnings[0]
    assert found.warnings[0].endswith("a.jsonl:21")
    late = make_preference("Why? " * 9, "x", "y")
    begins_alike = make_preference("Why?", "z" * 40 + "x", "z" * 40 + "y")
    cases: list[tuple[list[dict[str, Any]], dict[str, Any], str]] = [
        ([same, same], {}, r"of 2 pairs for train, chosen and rejected are the same in each; .*a\.jsonl:1"),
        ([begins_alike], {"length": 45, "overlong": "truncate"}, "are the same in each"),
        (
            [*ROWS, late],
            {"length": 45, "overlong": "truncate"},
            r"of 2 answers no token .*a\.jsonl:21, chosen\) is cut",
        ),
        ([{**same, "rejected": "user"}, {"chosen": "x"}], {}, r"a\.jsonl:2 has no 'rejected'"),
        (ROWS, {"loss_on": "all"}, "loss_on=all: preferences"),
    ]
    for records, settings, message in cases:
        with pytest.raises(RequestError, match=message):
            open_pairs(tmp_path / "a.jsonl", records, model_dir, **settings)
