import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from multigpu_cli.config.schema import DataConfig
from multigpu_cli.data.load import load_data_source
from multigpu_cli.data.loader import Loader
from multigpu_cli.data.source import DataSource
from multigpu_cli.errors import RequestError
from multigpu_cli.language.text import Vocabulary, Windows
from multigpu_cli.runtime.model_call import IGNORED

TEXT = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=1000))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "input.txt").write_text(TEXT)
    return tmp_path


def open_blocks(folder: Path | None, **args: Any) -> DataSource:
    return load_data_source(DataConfig(name="text", dir=str(folder) if folder else None, args={"block": 16} | args), 42)


def load_inputs(split: Any, source: DataSource, epoch: int, samples: list[int], processes: int = 0) -> list[list[int]]:
    """Inputs of some windows as training meets them."""
    loader = Loader(split, source, DataConfig(num_workers=processes), device=torch.device("cpu"), seed=5)
    rows = [
        row for batch in loader.iter_training_batches([torch.tensor(samples)], epoch) for row in batch.inputs.tolist()
    ]
    loader.close()
    return rows


def test_characters_of_a_file(folder: Path) -> None:
    source = open_blocks(folder)
    assert (source.input_shape, source.num_classes) == ((16,), len(set(TEXT)))
    assert (source.model, source.task) == ("gpt", "language-model")
    assert isinstance(source.codec, Vocabulary)
    inputs, targets = source.val[0]  # type: ignore[index]
    assert source.codec.decode(inputs.tolist()) == TEXT[900:916]
    assert source.codec.decode(targets.tolist()) == TEXT[901:917]


def test_held_out_windows_hold_each_token_once(folder: Path) -> None:
    source = open_blocks(folder, val=0.25)
    assert isinstance(source.codec, Vocabulary)
    targets = torch.cat([source.val[at][1] for at in range(len(source.val))])  # type: ignore[index, arg-type]
    counting = targets[targets != IGNORED].tolist()
    assert source.codec.decode(counting) == TEXT[751:]
    assert int((targets == IGNORED).sum()) == -249 % 16


def test_an_epoch_covers_the_text_about_once_and_the_next_one_cuts_elsewhere(folder: Path) -> None:
    source = open_blocks(folder)
    everything = list(range(len(source.train)))  # type: ignore[arg-type]
    first, again, second = (load_inputs(source.train, source, epoch, everything) for epoch in (0, 0, 1))
    assert first == again
    assert sum(a != b for a, b in zip(first, second, strict=True)) > 40
    text = open_text(source)
    starts = [text.index("".join(map(chr, row))) for row in first]
    assert starts == sorted(starts), "each from a stretch of its own"
    assert len(first) == 57
    assert all(after - before <= 2 * 16 for before, after in itertools.pairwise(starts))


def open_text(source: DataSource) -> str:
    """The training tokens, one character each."""
    return "".join(map(chr, source.train.tokens.tolist()))  # type: ignore[attr-defined]


@pytest.mark.parametrize("processes", [0, 1])
def test_a_window_depends_on_seed_epoch_and_number_alone(folder: Path, processes: int) -> None:
    source = open_blocks(folder)
    together = load_inputs(source.train, source, 3, [7, 3, 20])
    apart = [load_inputs(source.train, source, 3, [at], processes)[0] for at in (7, 3, 20)]
    assert apart == together


def test_an_epoch_may_be_shorter(folder: Path) -> None:
    source = open_blocks(folder, windows=10)
    assert len(source.train) == 10  # type: ignore[arg-type]
    text = open_text(source)
    starts = [text.index("".join(map(chr, row))) for row in load_inputs(source.train, source, 0, list(range(10)))]
    assert all(at * 88 <= start < (at + 1) * 89 for at, start in enumerate(starts))


def test_bytes_are_served_by_the_file_system(folder: Path) -> None:
    source = open_blocks(folder, tokens="bytes")
    assert source.num_classes == 256
    assert isinstance(source.train.tokens, np.memmap)  # type: ignore[attr-defined]
    assert bytes(source.train.tokens) == TEXT[:900].encode()  # type: ignore[attr-defined]


@pytest.mark.parametrize("ending", ["bin", "npy"])
def test_arrays_of_tokens_are_memory_mapped(folder: Path, ending: str) -> None:
    for split, count in (("train", 300), ("val", 100), ("test", 50)):
        tokens = (np.arange(count) % 40).astype(np.uint16)
        tokens.tofile(folder / f"{split}.bin") if ending == "bin" else np.save(folder / f"{split}.npy", tokens)
    source = open_blocks(folder)
    assert (source.num_classes, len(source.val), len(source.test)) == (40, 7, 4)  # type: ignore[arg-type]
    assert isinstance(source.train.tokens, np.memmap)  # type: ignore[attr-defined]
    assert len(source.train.tokens) == 300  # type: ignore[attr-defined]
    assert open_blocks(folder, vocabulary=64).num_classes == 64
    with pytest.raises(RequestError, match="token 32 near place 16 is beyond the vocabulary of 30"):
        list(open_blocks(folder, vocabulary=30).val)  # type: ignore[call-overload]


def test_the_shortest_text_that_can_be_trained_on() -> None:
    windows = Windows(np.arange(17), 16, 17, moving=True)
    assert len(windows) == 1
    assert windows[0][1].tolist() == list(range(1, 17))


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({"tokens": "words"}, r"data\.args\.tokens must be .* not 'words'"),
        ({"block": 0}, r"data\.args\.block must be a whole number of at least 1, not 0"),
        ({"val": 1.0}, r"data\.args\.val must be .* not 1\.0"),
        ({"windows": "many"}, r"data\.args\.windows"),
        ({"vocabulary": True}, r"data\.args\.vocabulary"),
        ({"block": 200}, "100 tokens for val are less than one window of 200"),
        ({"tokens": "arrays"}, "holds no train.bin or train.npy"),
        ({"file": "inptu.txt"}, "inptu.txt: there is no such file"),
    ],
)
def test_what_makes_no_dataset_is_refused(folder: Path, args: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        open_blocks(folder, **args)


def test_files_that_are_none_are_named(folder: Path) -> None:
    with pytest.raises(RequestError, match="needs --data-dir"):
        open_blocks(None)
    (folder / "other.txt").write_text("x")
    with pytest.raises(RequestError, match=r"must hold one \.txt file, and it holds input.txt, other.txt"):
        open_blocks(folder)
    (folder / "input.txt").write_bytes(b"ab\xff")
    with pytest.raises(RequestError, match=r"input.txt is not UTF-8 \(byte 2\)"):
        open_blocks(folder, file="input.txt")
    (folder / "input.txt").write_bytes(b"")
    with pytest.raises(RequestError, match=r"input\.txt is empty"):
        open_blocks(folder, file="input.txt")
    (folder / "train.npy").write_bytes(b"no array")
    with pytest.raises(RequestError, match=r"train\.npy"):
        open_blocks(folder)
    np.save(folder / "train.npy", np.zeros((3, 4)))
    with pytest.raises(RequestError, match=r"train\.npy holds float64 \(3, 4\)"):
        open_blocks(folder)
