"""How a user's classes are counted: without reading samples where the dataset says it, else in one seeded pass."""

import random
import sys
import weakref
from collections import Counter
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from multigpu_cli.config.schema import DataConfig
from multigpu_cli.data import load as infer_shape
from multigpu_cli.data.fetcher import SeededDataset
from multigpu_cli.data.load import load_data_source
from multigpu_cli.data.order import EVAL_EPOCH
from multigpu_cli.data.source import DataSource

SIZE = 100
LABELS = [index % 4 for index in range(SIZE)]


class Read(Dataset[Any]):
    """Notes which samples are read, and how many of their inputs are in memory at a time."""

    def __init__(self, size: int = SIZE, **attributes: Any) -> None:
        self.size, self.reads, self.inputs, self.most_alive = size, Counter[int](), list[Any](), 0
        vars(self).update(attributes)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        self.reads[index] += 1
        self.inputs = [each for each in self.inputs if each() is not None]
        self.most_alive = max(self.most_alive, len(self.inputs))
        found = torch.zeros(3)
        self.inputs.append(weakref.ref(found))
        return found, self.label(index)

    def label(self, index: int) -> Any:
        return index % 4


class Drawn(Read):
    def label(self, index: int) -> int:
        return random.randrange(10**6) + int(torch.randint(10**6, ())) + numpy.random.randint(10**6)


class Halved(Read):
    def label(self, index: int) -> int:
        return index % 4 // 2


class Elsewhere(Read):
    """Of a tenth of the samples the class is another than the list has."""

    def label(self, index: int) -> Any:
        return 6 if index // 10 == 2 else index % 4


class Real(Read):
    def label(self, index: int) -> float:
        return index + 0.5


class Tokens(Read):
    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        super().__getitem__(index)
        return torch.tensor([index, 1]), torch.tensor([1, index + 1])


def load(monkeypatch: pytest.MonkeyPatch, dataset: Dataset[Any], seed: int = 42, **more: Any) -> DataSource:
    module = ModuleType("data_of_this_test")
    vars(module)["splits"] = lambda split: dataset if split == "train" else None
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return load_data_source(DataConfig(name="data_of_this_test:splits"), seed, **more)


@pytest.mark.parametrize(
    "declared",
    [
        {"num_classes": 4},
        {"classes": list("abcd")},
        {"targets": LABELS},
        {"labels": numpy.array(LABELS)},
        {"labels": LABELS, "targets": None},
    ],
    ids="-".join,
)
@pytest.mark.parametrize("part", [False, True], ids=["whole", "subset"])
def test_where_the_dataset_says_it_a_few_samples_are_read(
    monkeypatch: pytest.MonkeyPatch, declared: dict[str, Any], part: bool
) -> None:
    dataset = Read(**declared)
    assert load(monkeypatch, Subset(dataset, range(1, 60)) if part else dataset).num_classes == 4
    assert 0 < dataset.reads.total() <= 20


@pytest.mark.parametrize("attributes", [{}, {"targets": None}, {"targets": LABELS[1:]}, {"labels": list("abcd")}])
def test_else_each_sample_is_read_once_and_not_kept(
    monkeypatch: pytest.MonkeyPatch, attributes: dict[str, Any]
) -> None:
    dataset = Read(**attributes)
    assert load(monkeypatch, dataset).num_classes == 4
    assert set(dataset.reads) == set(range(SIZE))
    assert dataset.reads.total() == SIZE + 1, "the first one for its shape, too"
    assert dataset.most_alive <= 3


def test_targets_that_the_samples_do_not_have_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(monkeypatch, Halved(targets=LABELS)).num_classes == 2
    assert load(monkeypatch, Elsewhere(targets=LABELS)).num_classes == 7


def test_random_labels_are_those_of_the_seed_as_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    keyed = SeededDataset(Drawn(), 42)
    expected = max(keyed[EVAL_EPOCH, index][1][1] for index in range(SIZE)) + 1
    assert [load(monkeypatch, Drawn()).num_classes for _ in range(2)] == [expected] * 2
    assert load(monkeypatch, Drawn(), seed=43).num_classes != expected


def test_targets_that_are_no_classes_end_the_reading_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many samples there are; with a single whole number in front of them, too."""
    for dataset in (Real(200_000), Real(SIZE, label=lambda index: index / 3)):
        assert load(monkeypatch, dataset).num_classes == 0
        assert dataset.reads.total() <= 3


def test_tokens_are_counted_with_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Tokens()
    assert load(monkeypatch, dataset).num_classes == SIZE + 1
    assert dataset.reads.total() == SIZE + 1


def test_a_long_reading_says_how_far_it_is_and_what_skips_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By one process of a machine; every sample is progress for the watchdog."""
    moves: list[None] = []
    load(monkeypatch, Read(), moved=lambda: moves.append(None))
    assert not caplog.messages, "it took no time"
    assert len(moves) >= SIZE - 1
    monkeypatch.setattr(infer_shape, "_MOMENT", -1.0)
    load(monkeypatch, Read())
    (said,) = caplog.messages
    assert said.startswith("counting the classes: 1 of 100 samples read; ")
    assert "num_classes" in said
    monkeypatch.setattr(infer_shape, "_INTERVAL", -1.0)
    load(monkeypatch, Read())
    assert caplog.messages[-1].startswith("counting the classes: 99 of 100 samples read; ")
    caplog.clear()
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    load(monkeypatch, Read())
    assert not caplog.messages
