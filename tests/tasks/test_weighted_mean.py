"""Cross-entropies with weights, or with labels that do not count, are means over the global batch, however divided."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError
from multigpu_cli.tasks.weighted_mean import WeightedMean, find_weighted_mean
from tests.support.ranks import run_on_each_rank
from train_multi_gpu import evaluate_with_multi_gpu, train_with_multi_gpu

WEIGHTS = torch.tensor([0.1, 3.7, 20.0])
CRITERIA: dict[str, nn.Module] = {
    "weights": nn.CrossEntropyLoss(WEIGHTS),
    "ignored": nn.CrossEntropyLoss(ignore_index=2),
    "both, smoothed": nn.CrossEntropyLoss(WEIGHTS, ignore_index=1, label_smoothing=0.1),
    "several labels": nn.CrossEntropyLoss(),
    "log-likelihoods": nn.NLLLoss(WEIGHTS),
}


@pytest.mark.parametrize("criterion", CRITERIA.values(), ids=CRITERIA)
@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_sums_of_parts_give_the_mean_over_all(criterion: Any, sizes: list[int], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, 3, (sum(sizes), 5), generator=draw)
    outputs = torch.randn(sum(sizes), 3, 5, generator=draw).log_softmax(1)
    mean = WeightedMean(criterion)
    parts = list(zip(outputs.split(sizes), targets.split(sizes), strict=True))
    units = sum(int(mean.units(part)) for _, part in parts)
    assert units == int(mean.units(targets)), "without rounding"
    if units:
        total = sum(float(mean.loss_sum(*part)) for part in parts)
        assert total / units == pytest.approx(float(criterion(outputs, targets)), rel=1e-5)


@pytest.mark.parametrize("weights", [[1e-8, 1.0], [1e30, 1e-30], [0.0, 3.0]])
def test_class_of_little_weight_has_its_own_mean(weights: list[float]) -> None:
    """torch divides by a weight of 1e-60, too; here it is no step, as a weight of 0."""
    criterion, draw = nn.CrossEntropyLoss(torch.tensor(weights)), torch.Generator().manual_seed(0)
    outputs, mean = torch.randn(9, 2, generator=draw), WeightedMean(criterion)
    for label in (0, 1):
        targets = torch.full((9,), label)
        units, total = int(mean.units(targets)), float(mean.loss_sum(outputs, targets))
        assert units == total == 0 or total / units == pytest.approx(float(criterion(outputs, targets)), rel=1e-6)


def test_part_without_labels_adds_nothing() -> None:
    mean, void = WeightedMean(nn.CrossEntropyLoss()), torch.full((2, 4), -100)
    assert (int(mean.units(void)), float(mean.loss_sum(torch.randn(2, 3, 4), void))) == (0, 0.0)


def test_samples_are_the_units_where_each_weighs_one() -> None:
    one_each, smooth = torch.tensor([1, 2]), nn.CrossEntropyLoss(label_smoothing=0.1)
    assert find_weighted_mean(smooth, one_each, one_each) is None
    assert find_weighted_mean(smooth, one_each, torch.tensor([1, -100])) is not None
    assert find_weighted_mean(smooth, one_each, None) is not None, "its labels have not been read"
    assert find_weighted_mean(nn.CrossEntropyLoss(WEIGHTS), torch.rand(4, 3), None) is None, "shares of classes"
    assert find_weighted_mean(nn.CrossEntropyLoss(WEIGHTS, reduction="none"), one_each, None) is None


@pytest.mark.parametrize("weights", [[-1.0, 2.0], [0.0, 0.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_weights_that_make_no_mean_are_refused(weights: list[float]) -> None:
    with pytest.raises(RequestError, match=r"criterion: its weights range from .*\n  try: finite"):
        WeightedMean(nn.CrossEntropyLoss(torch.tensor(weights)))


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are fetched one by one, so that nobody sees all labels before."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = list(tensors)

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tensors[0][index], self.tensors[1][index]


def make_task(case: str) -> tuple[Dataset[Any], nn.Module, nn.Module]:
    """32 samples, a network and a criterion; whole micro-batches have no label that counts."""
    draw = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(32, 3, 7, generator=draw), torch.randint(0, 3, (32, 7), generator=draw)
    labels[::4], labels[1::4, 3:] = -100, -100
    single = torch.where(torch.arange(32) % 5 == 0, -100, labels.abs()[:, 0] % 3)
    torch.manual_seed(1)
    if case == "pixels":
        return TensorDataset(inputs, labels), nn.Conv1d(3, 3, 1), nn.CrossEntropyLoss(WEIGHTS)
    if case == "samples in memory":
        return TensorDataset(inputs[..., 0], single), nn.Linear(3, 3), nn.CrossEntropyLoss()
    network = nn.Sequential(nn.Linear(3, 3), nn.LogSoftmax(1))
    return Rows(inputs[..., 0], single), network, nn.NLLLoss(WEIGHTS)


def train(case: str, size: int, workers: int, folder: Path) -> list[tuple[float, str]]:
    """How far a step of the rate 1 is from that of plain PyTorch, relatively, and the fingerprint; of each rank."""

    def run(world: World | None) -> tuple[float, str]:
        data, model, criterion = make_task(case)
        before = [p.detach().clone() for p in model.parameters()]
        inputs, targets = data[:] if isinstance(data, TensorDataset) else data.tensors  # type: ignore[attr-defined]
        wanted = torch.autograd.grad(criterion(model(inputs), targets), list(model.parameters()))
        results = train_with_multi_gpu(
            model,
            DataLoader(data, batch_size=size),
            torch.optim.SGD(model.parameters(), lr=1.0),
            criterion,
            num_epochs=1,
            global_batch_size=32,
            exact=True,
            save_dir=str(folder / f"{size}-{workers}"),
            screen="silent",
        )
        moved = [b - p.detach() for b, p in zip(before, model.parameters(), strict=True)]
        apart = torch.cat([(a - b).flatten() for a, b in zip(moved, wanted, strict=True)]).norm()
        return float(apart / torch.cat([each.flatten() for each in wanted]).norm()), results["summary"]["fingerprint"]

    return [run(None)] if workers == 1 else run_on_each_rank(workers, run)


@pytest.mark.parametrize(
    "case",
    [
        "pixels",
        pytest.param("samples in memory", marks=pytest.mark.slow),
        pytest.param("samples on the disk", marks=pytest.mark.slow),
    ],
)
def test_step_is_that_of_plain_torch_at_any_micro_batch(tmp_path: Path, case: str) -> None:
    fingerprints: dict[int, set[str]] = {}
    for size, workers in product([1, 2, 8, 32], [1, 2, 3]):
        for apart, fingerprint in train(case, size, workers, tmp_path):
            assert apart < 1e-6
            fingerprints.setdefault(size, set()).add(fingerprint)
    assert [len(each) for each in fingerprints.values()] == [1] * 4, "on any number of workers"


@pytest.mark.parametrize("size", [3, 32])
def test_evaluation_is_of_the_labels_that_count(size: int) -> None:
    data, model, _ = make_task("samples in memory")
    criterion = nn.CrossEntropyLoss(WEIGHTS)
    inputs, targets = data[:]
    results = evaluate_with_multi_gpu(model, DataLoader(data, batch_size=size), criterion, screen="silent")
    with torch.no_grad():
        outputs = model(inputs)
    counted = targets != -100
    assert results["test_loss"] == pytest.approx(float(criterion(outputs, targets)), rel=1e-6)
    assert results["accuracy"] == pytest.approx(float((outputs.argmax(1) == targets)[counted].float().mean()) * 100)
