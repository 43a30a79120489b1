import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Subset, TensorDataset

from multigpu_cli.config.schema import DataConfig
from multigpu_cli.data.load import load_data_source
from multigpu_cli.data.source import DataSource
from multigpu_cli.errors import RequestError

MODULE = """
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

class Stream(IterableDataset):
    classes = ["ant", "bee"]
    def __init__(self, count=100):
        self.count = count
    def __iter__(self):
        for index in range(self.count):
            yield {"x": torch.rand(3), "y": index % 2}

def streams(split):
    return Stream(50)

def tensors(count=100, classes=3, seed=0):
    return TensorDataset(torch.arange(count * 8).view(count, 2, 4).float(), torch.arange(count) % classes)

class Items(Dataset):
    def __init__(self, count=100):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        return torch.full((5,), float(index)), index % 4

class Named(Items):
    classes = ["ant", "bee", "cat", "dog"]

class Counted(Items):
    num_classes = 7

class Regression(Items):
    def __getitem__(self, index):
        return torch.zeros(5), index / 3

class Wordy(Items):
    def __getitem__(self, index):
        return {"words": [index]}, 1

def by_split(split, data_dir=None, mode="", seed=0, size=10):
    calls.append((split, data_dir, mode, seed))
    return None if split == "val" else tensors(size if split == "train" else 5)
calls = []

def without_training(split):
    return None

def nothing():
    return None

def number():
    return 7

def pairless():
    return TensorDataset(torch.zeros(20, 2))

def empty(split):
    return tensors(0) if split == "train" else None

def empty_val(split):
    return tensors(0 if split == "val" else 10)

def needs(path):
    return tensors()
"""


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A user's module in the working directory, which differs from test to test."""
    (tmp_path / "my_data_for_tests.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("my_data_for_tests", None)
    yield
    sys.modules.pop("my_data_for_tests", None)


def open_own(factory: str, seed: int = 42, **config: Any) -> DataSource:
    return load_data_source(DataConfig(name=f"my_data_for_tests:{factory}", **config), seed)


def numbers(split: Any) -> list[int]:
    """Which samples a part of `tensors` or `Items` holds."""
    return [int(split[at][0].flatten()[0]) for at in range(len(split))]


def test_a_dataset_of_ours() -> None:
    source = load_data_source(DataConfig(name="digits", args={"augment": False}), 42)
    assert (source.num_classes, source.input_shape, source.augment) == (10, (1, 8, 8), None)


def test_one_dataset_is_divided_by_seed() -> None:
    source = open_own("Items")
    parts = [numbers(part) for part in (source.train, source.val, source.test)]
    assert [len(part) for part in parts] == [80, 10, 10]
    assert sorted(sum(parts, [])) == list(range(100))  # noqa: RUF017 - three short lists
    assert parts[1] != sorted(parts[1]), "drawn, not cut off"
    again, other = open_own("Items"), open_own("Items", seed=43)
    assert numbers(again.val) == parts[1]
    assert numbers(other.val) != parts[1]


def test_tensors_stay_tensors_when_they_are_divided() -> None:
    source = open_own("tensors")
    assert isinstance(source.train, TensorDataset)
    assert isinstance(source.val, TensorDataset)
    assert isinstance(open_own("Items").train, Subset)
    rows = [row // 8 for row in numbers(source.train)]
    assert source.train.tensors[1].tolist() == [row % 3 for row in rows], "targets go with their inputs"


@pytest.mark.parametrize(
    ("factory", "shape", "classes"),
    [
        ("tensors", (2, 4), 3),
        ("Items", (5,), 4),
        ("Named", (5,), 4),
        ("Counted", (5,), 7),
        ("Regression", (5,), 0),
        ("Wordy", (), 2),
        ("by_split", (2, 4), 3),
    ],
)
def test_shape_and_classes_are_learned_from_the_data(factory: str, shape: tuple[int, ...], classes: int) -> None:
    source = open_own(factory)
    assert (source.input_shape, source.num_classes) == (shape, classes)


def test_whole_arrays_are_a_dataset() -> None:
    """As scikit-learn's own functions return them."""
    for args, shape in (({}, (4,)), ({"return_X_y": True}, (4,))):
        source = load_data_source(DataConfig(name="sklearn.datasets:load_iris", args=args), 42)
        assert (source.input_shape, source.num_classes, len(source.train)) == (shape, 3, 120)  # type: ignore[arg-type]
    source = load_data_source(DataConfig(name="sklearn.datasets:load_diabetes"), 42)
    assert (source.input_shape, source.num_classes) == ((10,), 0)


def test_a_factory_with_splits_is_called_once_for_each() -> None:
    source = open_own("by_split", dir="/somewhere", mode="first", args={"size": 12})
    assert len(source.train) == 12  # type: ignore[arg-type]
    assert source.val is None
    assert len(source.test) == 5  # type: ignore[arg-type]
    calls = sys.modules["my_data_for_tests"].calls
    assert calls == [(split, "/somewhere", "first", 42) for split in ("train", "val", "test")]


@pytest.mark.parametrize(
    ("factory", "named"),
    [
        ("nothing", "the factory returned an object of type NoneType"),
        ("number", "the factory returned an object of type int"),
        ("pairless", r"sample 0 must be \(input, target\), not tuple of 1"),
        ("without_training", "returned None for split='train'"),
        ("empty", "split train: the dataset is empty"),
        ("empty_val", "split val: the dataset is empty"),
        ("needs", "needs path"),
    ],
)
def test_what_is_no_dataset_is_refused(factory: str, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        open_own(factory)


def test_too_few_samples_to_divide() -> None:
    with pytest.raises(RequestError, match="4 samples can't be divided"):
        open_own("Items", args={"count": 4})


def test_an_argument_that_the_factory_does_not_take() -> None:
    with pytest.raises(RequestError, match=r"data\.args\.cuont") as refused:
        open_own("Items", args={"cuont": 4})
    assert "did you mean 'count'?" in refused.value.remedy


def test_too_many_samples_to_look_through_for_classes() -> None:
    with pytest.raises(RequestError, match="too many to infer") as refused:
        open_own("Items", args={"count": 200_000})
    assert "num_classes" in refused.value.remedy
    assert open_own("Counted", args={"count": 200_000}).num_classes == 7


def test_targets_of_a_tensor_dataset_that_are_no_classes(tmp_path: Path) -> None:
    text = "def floats():\n    return TensorDataset(torch.zeros(20, 2), torch.rand(20))\n"
    (tmp_path / "my_data_for_tests.py").write_text(MODULE + text)
    assert open_own("floats").num_classes == 0


def test_labels_held_in_tensors_are_classes_too(tmp_path: Path) -> None:
    text = "class Boxed(Items):\n    def __getitem__(self, at):\n        return torch.zeros(2), torch.tensor(at % 6)\n"
    (tmp_path / "my_data_for_tests.py").write_text(MODULE + text)
    assert open_own("Boxed").num_classes == 6


def test_a_stream_is_read_once_and_then_has_numbers() -> None:
    source, again = open_own("Stream"), open_own("Stream")
    assert [len(part) for part in (source.train, source.val, source.test)] == [80, 10, 10]  # type: ignore[arg-type]
    assert (source.input_shape, source.num_classes) == ((3,), 2)
    assert "an iterable dataset, read once" in source.note
    first, twice = source.train[5]["x"].tolist(), again.train[5]["x"].tolist()
    assert first == source.train[5]["x"].tolist() == twice
    assert open_own("Stream", seed=1).train[5]["x"].tolist() != first
    split = open_own("streams")
    assert split.train[0]["x"].tolist() != split.val[0]["x"].tolist(), "no split repeats another"  # type: ignore[index]


@pytest.mark.parametrize(
    ("count", "named"), [(0, "the iterable dataset is empty"), (10**9, "does not end after 100,000 samples")]
)
def test_a_stream_without_samples_or_end_is_refused(count: int, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        open_own("Stream", args={"count": count})


def test_tokens_and_those_that_follow_have_a_vocabulary(tmp_path: Path) -> None:
    text = "def tokens():\n    rows = torch.arange(40).view(20, 2)\n    return TensorDataset(rows, (rows + 1) % 50)\n"
    (tmp_path / "my_data_for_tests.py").write_text(MODULE + text)
    assert open_own("tokens").num_classes == 41
