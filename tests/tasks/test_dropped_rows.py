"""Batches of a collate_fn that returns other rows than it was given samples: refused, unless each has its reason."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, ctc_loss, mse_loss
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from multigpu_cli.config.schema import TaskConfig
from multigpu_cli.data.collate import Collate
from multigpu_cli.data.loader import Batch
from multigpu_cli.data.source import DataSource
from multigpu_cli.errors import RequestError
from multigpu_cli.models.build import adapt_model
from multigpu_cli.tasks.base import Task
from multigpu_cli.tasks.own_loss import Criterion, FromModel
from multigpu_cli.tasks.supervised import Classification, MultiLabel, Regression

SAMPLES = 8


class Labelled(nn.Module):
    """Returns a loss."""

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return inputs.mean() - labels.float().mean()


def make_task(kind: type[Task], targets: Any) -> Task:
    sample = (torch.zeros(3), next(iter(targets), 0) if isinstance(targets, Tensor) else targets)
    source = DataSource(train=[sample], val=None, test=None, input_shape=(3,), num_classes=3)  # type: ignore[arg-type]
    return Criterion(source, TaskConfig(), cross_entropy) if kind is Criterion else kind(source, TaskConfig())


def make_batch(inputs: Any, targets: Any) -> Batch:
    return Batch(inputs, targets, torch.arange(SAMPLES), 0)


@pytest.mark.parametrize(
    ("kind", "rows", "targets"),
    [
        (Classification, 6, torch.arange(6) % 3),
        (Classification, 9, torch.arange(9) % 3),
        (Classification, 6, torch.eye(3).repeat(2, 1)),
        (MultiLabel, 6, torch.ones(6, 3)),
        (Regression, 6, torch.ones(6, 3)),
        (Regression, 1, torch.ones(1, 3)),
        (Criterion, 6, torch.arange(6) % 3),
        (Criterion, 0, torch.arange(0)),
        (FromModel, 6, torch.ones(6)),
    ],
)
@pytest.mark.parametrize("method", ["loss_sum", "measure"])
def test_batch_without_some_of_its_samples_is_refused(
    kind: type[Task], rows: int, targets: Tensor, method: str
) -> None:
    task = make_task(kind, torch.ones(1, 3) if kind is FromModel else targets)
    model = adapt_model(Labelled()) if kind is FromModel else nn.Identity()
    with pytest.raises(RequestError, match=rf"collate_fn returned {rows} targets? for 8 samples") as refused:
        getattr(task, method)(model, make_batch(torch.randn(rows, 3), targets))
    assert "leave samples that can't be read out of the dataset" in refused.value.remedy


def join_ctc(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    return ctc_loss(log_probabilities, targets, torch.full((SAMPLES,), 5), torch.ones(SAMPLES, dtype=torch.int64))


@pytest.mark.parametrize(
    ("outputs", "targets", "criterion"),
    [
        (torch.randn(5, SAMPLES, 3), torch.ones(SAMPLES, dtype=torch.int64), join_ctc),
        (torch.randn(3, SAMPLES), torch.randn(3, SAMPLES), mse_loss),
        (torch.randn(1, 40, 3), torch.ones(1, 40, dtype=torch.int64), lambda out, y: cross_entropy(out[0], y[0])),
        (torch.randn(2, 7), torch.randn(2, 7), mse_loss),
        (torch.randn(SAMPLES, 4), torch.ones(5, dtype=torch.int64), lambda out, y: out.mean() + y.sum()),
        ({"logits": torch.randn(SAMPLES, 4)}, {"boxes": torch.zeros(0, 4)}, lambda out, y: out["logits"].mean()),
        ([torch.randn(3), torch.randn(2)], [torch.randn(3), torch.randn(2)], lambda out, y: out[0].mean()),
    ],
    ids=["ctc", "time first", "packed", "rows of several", "labels of boxes", "no box", "lists"],
)
def test_criterion_takes_rows_that_are_not_samples(
    outputs: Any, targets: Any, criterion: Callable[..., Tensor]
) -> None:
    task, batch = make_task(Criterion, targets), make_batch(outputs, targets)
    task.criterion = criterion  # type: ignore[attr-defined]
    expected = float(criterion(outputs, targets)) * SAMPLES
    assert float(task.loss_sum(lambda given: given, batch)) == pytest.approx(expected)


def test_accuracy_of_several_rows_per_sample_is_over_rows() -> None:
    targets = torch.arange(20) % 3
    task = make_task(Criterion, targets)
    outputs = torch.eye(3)[torch.where(torch.arange(20) < 5, (targets + 1) % 3, targets)]
    measured = task.measure(nn.Identity(), make_batch(outputs, targets))
    assert task.metrics(measured.counts, SAMPLES) == {"accuracy": 15 / 20}


def test_tokens_packed_into_fewer_rows_are_taken() -> None:
    labels = torch.ones(2, 20, dtype=torch.int64)
    batch = make_batch(torch.randn(2, 20), labels)
    assert torch.isfinite(make_task(FromModel, labels).loss_sum(adapt_model(Labelled()), batch))


class Samples(list[Any]):
    """A dataset with a collate_fn; samples are (input, target) tensors, None, or of any length."""

    def __init__(self, samples: list[Any], collate_fn: Callable[[list[Any]], Any]) -> None:
        super().__init__(samples)
        self.collate_fn = collate_fn


def drop_none(samples: list[Any]) -> Any:
    return default_collate([sample for sample in samples if sample is not None])


def pack(samples: list[Any]) -> Any:
    """Rows of 6 numbers, zeros at the end, each of as many samples as fit."""
    rows: list[Tensor] = []
    for inputs, _ in samples:
        if rows and len(rows[-1]) + len(inputs) <= 6:
            rows[-1] = torch.cat([rows[-1], inputs])
        else:
            rows.append(inputs)
    packed = torch.stack([torch.cat([row, torch.zeros(6 - len(row))]) for row in rows])
    return packed, packed


def put_time_first(samples: list[Any]) -> Any:
    return torch.stack([sample[0] for sample in samples], dim=1), torch.stack([sample[1] for sample in samples], dim=1)


def join_pairs(samples: list[Any]) -> Any:
    inputs, targets = default_collate(samples)
    return inputs.unflatten(0, (-1, 2)), targets.unflatten(0, (-1, 2))


def measure_all(samples: Samples, criterion: Callable[..., Tensor]) -> tuple[float, float]:
    """The loss of a batch of all samples, in training and in an evaluation, by a network that changes nothing."""
    source = DataSource(train=samples, input_shape=(3,), num_classes=0)  # type: ignore[arg-type]
    task, collated = Criterion(source, TaskConfig(), criterion), Collate(samples)(list(enumerate(samples)))  # type: ignore[arg-type]
    batch = Batch(*collated, torch.arange(len(samples)), 0)
    losses = task.loss_sum(lambda given: given, batch), task.measure(nn.Identity(), batch).loss_sum
    return float(losses[0]) / len(samples), float(losses[1]) / len(samples)


@pytest.mark.parametrize(
    "target",
    [torch.ones(3), torch.ones(2, 4, 4), {"a": torch.ones(3), "b": torch.ones(2)}],
    ids=["vector", "map", "dict"],
)
@pytest.mark.parametrize("first", [0, 5])
def test_criterion_refuses_dropped_samples_with_several_targets(target: Any, first: int) -> None:
    samples: list[Any] = [(torch.ones(3), target)] * SAMPLES
    samples[first] = samples[6] = None

    def criterion(outputs: Tensor, targets: Any) -> Tensor:
        return torch.stack([leaf.mean() for leaf in tree_leaves((outputs, targets))]).sum()

    with pytest.raises(RequestError, match="collate_fn returned 6 targets for 8 samples"):
        measure_all(Samples(samples, drop_none), criterion)


def test_model_with_a_loss_refuses_dropped_samples() -> None:
    samples = Samples([(torch.ones(3), torch.ones(3))] * 6 + [None, None], drop_none)
    source = DataSource(train=samples, input_shape=(3,), num_classes=0)  # type: ignore[arg-type]
    batch = make_batch(torch.ones(6, 3), torch.ones(6, 3))
    with pytest.raises(RequestError, match="collate_fn returned 6 targets for 8 samples"):
        FromModel(source, TaskConfig()).loss_sum(adapt_model(Labelled()), batch)


@pytest.mark.parametrize(
    ("lengths", "collate"),
    [
        ([5, 5, 6, 4, 2, 1, 3, 3], pack),
        ([6, 6, 6, 6, 6, 6, 3, 3], pack),
        ([4] * SAMPLES, put_time_first),
        ([4] * SAMPLES, join_pairs),
    ],
    ids=["packed", "packed, short samples last", "time first", "pairs"],
)
def test_criterion_keeps_layouts_of_a_collate_fn(lengths: list[int], collate: Callable[[list[Any]], Any]) -> None:
    values = [torch.rand(length) for length in lengths]
    samples = Samples([(value, value + 1) for value in values], collate)
    inputs, targets = collate(samples)
    assert len(inputs) < SAMPLES
    assert measure_all(samples, mse_loss) == pytest.approx((float(mse_loss(inputs, targets)),) * 2)


def test_criterion_asks_a_collate_fn_once_for_its_layout() -> None:
    calls = []

    def collate(samples: list[Any]) -> Any:
        calls.append(len(samples))
        return join_pairs(samples)

    samples = Samples([(torch.ones(3), torch.ones(3))] * SAMPLES, collate)
    measure_all(samples, mse_loss)
    assert calls == [SAMPLES, SAMPLES], "the batch itself, and copies of the first sample; none for the evaluation"
