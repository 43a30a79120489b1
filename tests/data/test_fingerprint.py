import random
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset, TensorDataset

from multigpu_cli.data.fingerprint import compute_fingerprint, find_shared_samples
from multigpu_cli.data.source import DataSource
from multigpu_cli.run.request.checks import group_ranks


def source(inputs: torch.Tensor, targets: torch.Tensor, **more: Any) -> DataSource:
    return DataSource(
        train=TensorDataset(inputs, targets), val=None, test=None, input_shape=(3,), num_classes=2, **more
    )


INPUTS, TARGETS = torch.randn(50, 3, generator=torch.Generator().manual_seed(1)), torch.arange(50) % 2
HERE = source(INPUTS, TARGETS)


def same(one: DataSource, other: DataSource) -> bool:
    marks, sums = zip(*(compute_fingerprint(each, 42) for each in (one, other)), strict=True)
    return group_ranks(marks, sums) == [0, 0]


def test_the_same_data_have_the_same_mark() -> None:
    assert same(HERE, source(INPUTS.clone(), TARGETS.clone()))
    assert same(HERE, source(INPUTS + 1e-9, TARGETS)), "machines round differently"


@pytest.mark.parametrize(
    "other",
    [
        source(INPUTS.index_fill(0, torch.tensor([17]), 0.5), TARGETS),
        source(INPUTS[torch.arange(49, -1, -1)], TARGETS),
        source(INPUTS, 1 - TARGETS),
        source(INPUTS[:49], TARGETS[:49]),
        source(INPUTS.double(), TARGETS),
        replace(HERE, val=HERE.train),
        replace(HERE, class_names=("cat", "dog")),
    ],
    ids=["a sample", "their order", "targets", "length", "format", "another split", "names"],
)
def test_what_differs_shows(other: DataSource) -> None:
    assert not same(HERE, other)


def test_the_values_are_summed_piece_by_piece() -> None:
    made: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **kwargs or {})
            made.append(0 if func.is_view or not isinstance(result, torch.Tensor) else result.nbytes)
            return result

    big = source(torch.rand(2**16, 32, generator=torch.Generator().manual_seed(1)), torch.zeros(2**16))
    with Sizes():
        compute_fingerprint(big, 42)
    assert 2**17 < max(made) <= 2**20, "16 MiB of positions in double precision were the peak of a training's memory"


def test_the_data_stay_as_they_are() -> None:
    values = torch.tensor([[0.5, float("nan"), float("inf")]], dtype=torch.float64)
    compute_fingerprint(source(values, torch.zeros(1)), 42)
    assert values.isnan().tolist() == [[False, True, False]]
    assert values[0, 2].isinf()


class Files(Dataset[Any]):
    """Samples that are fetched one by one, in many forms; with a part of their own randomness if asked for."""

    def __init__(self, text: Any = "a", *, own_noise: bool = False) -> None:
        self.text, self.own_noise = text, own_noise

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        noise = random.SystemRandom().random() if self.own_noise else random.random()
        return {"x": torch.rand(2), "y": [numpy.arange(index), self.text], "noise": noise}


def make_source(dataset: Files) -> DataSource:
    return DataSource(train=dataset, val=None, test=None, input_shape=(2,), num_classes=2)


def test_samples_that_are_fetched_one_by_one_are_looked_at_too() -> None:
    assert same(make_source(Files()), make_source(Files()))
    assert not same(make_source(Files()), make_source(Files("b")))
    assert same(make_source(Files(own_noise=True)), make_source(Files(own_noise=True))), (
        "its own randomness marks nothing"
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (numpy.array(["a", "b"]), numpy.array(["a", "c"])),
        (numpy.arange(4)[::-1], numpy.arange(4)),
        (numpy.array("2026-11-22", dtype="datetime64[D]"), numpy.array("2026-11-23", dtype="datetime64[D]")),
        (torch.eye(3).to_sparse(), torch.ones(3, 3).to_sparse()),
    ],
    ids=["words", "backwards", "dates", "sparse"],
)
def test_samples_of_any_kind_are_marked(one: Any, other: Any) -> None:
    """Whether a task can make something of them is not for the mark to say."""
    assert same(make_source(Files(one)), make_source(Files(one)))
    assert not same(make_source(Files(one)), make_source(Files(other)))


def test_a_users_dataset_is_looked_at_in_another_process() -> None:
    """One that opens its file at the first sample would otherwise share it with all its loader processes."""

    class Lazy(Files):
        opened = False

        def __getitem__(self, index: int) -> Any:
            self.opened = True
            return super().__getitem__(index)

    dataset = Lazy()
    compute_fingerprint(make_source(dataset), 42)
    assert not dataset.opened


def find_shared(source: DataSource) -> list[str]:
    return find_shared_samples(source, compute_fingerprint(source, 42))


def test_splits_of_the_same_samples_are_named() -> None:
    other = source(INPUTS + 1, TARGETS).train
    assert find_shared(replace(HERE, val=other)) == []
    assert find_shared(replace(HERE, val=other, test=other)) == [
        "the test samples are the validation samples: 50 of both, all that were looked at are the same"
    ]
    assert len(find_shared(replace(HERE, val=HERE.train, test=HERE.train))) == 3
    assert len(find_shared(replace(make_source(Files()), val=Files()))) == 1
    assert find_shared(replace(make_source(Files()), val=Files("b"))) == []
    episodes: Any = range(4)
    assert find_shared(replace(HERE, train=episodes, val=episodes)) == [], "they are no samples"


def test_samples_of_which_nothing_is_known_are_not_named() -> None:
    class Noise(Files):
        def __getitem__(self, index: int) -> Any:
            return torch.from_numpy(numpy.random.default_rng().random(2))

    assert find_shared(replace(make_source(Noise()), val=Noise())) == []
