import random
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from multigpu_cli.config.schema import DataConfig, TaskConfig
from multigpu_cli.data.loader import Batch, Loader
from multigpu_cli.data.source import DataSource
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import OutOfMemory, RequestError
from multigpu_cli.runtime.precision import Precision
from multigpu_cli.tasks.base import RENAMED, BatchMetrics, Task
from multigpu_cli.tasks.supervised import Classification
from tests.support.ranks import run_on_each_rank
from tests.support.world import ALONE, CPU


def split(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(count)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.randint(4, (count,), generator=generator))


def evaluate(count: int, batch_size: int, precision: str = "off") -> Callable[[World], Any]:
    """What this rank's evaluation of `count` samples finds, as plain values."""

    def work(world: World) -> Any:
        test = split(count)
        source = DataSource(train=test, val=None, test=test, input_shape=(6,), num_classes=4)
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))
        loader = Loader(test, source, DataConfig(), device=CPU, seed=1)
        components = Classification(source, TaskConfig())
        found = components.evaluate(model, loader, world, Precision(precision, CPU), batch_size)
        return [found.metrics, found.samples, found.details]

    return work


@pytest.mark.parametrize(("count", "batch_size"), [(97, 8), (64, 64), (5, 8), (1, 4), (30, 10)])
def test_every_sample_counts_once(count: int, batch_size: int) -> None:
    metrics, samples, details = evaluate(count, batch_size)(ALONE)
    assert samples == count
    assert sum(map(sum, details["confusion"])) == count
    assert sum(row["support"] for row in details["per_class"]) == count
    assert 0 <= metrics["accuracy"] <= 1


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize(("count", "batch_size"), [(97, 8), (17, 8), (5, 8)], ids=["many", "few", "idle workers"])
def test_any_number_of_workers_finds_the_same_bits(workers: int, count: int, batch_size: int) -> None:
    alone = evaluate(count, batch_size)(ALONE)
    assert run_on_each_rank(workers, evaluate(count, batch_size)) == [alone] * workers


def test_the_batch_size_changes_nothing_but_rounding() -> None:
    one, other = evaluate(97, 8)(ALONE), evaluate(97, 33)(ALONE)
    assert one[2] == other[2]
    assert one[0]["loss"] == pytest.approx(other[0]["loss"], rel=1e-6)


def test_mixed_precision_is_used() -> None:
    full, half = evaluate(97, 8)(ALONE), evaluate(97, 8, "bf16")(ALONE)
    assert full[0]["loss"] != half[0]["loss"]
    assert full[0]["loss"] == pytest.approx(half[0]["loss"], rel=0.05)


class Counting(Task):
    """The least that a user's own task has to say."""

    def loss_sum(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        loss: Tensor = model(batch.inputs).square().sum()
        return loss

    def measure(self, model: nn.Module, batch: Batch) -> BatchMetrics:
        self.seen_training = model.training
        assert not torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled(), "a table that the model keeps has to take part in training"
        return BatchMetrics(batch.targets.sum().double(), torch.tensor([len(batch), 1]))


def counting(world: World, count: int = 23) -> tuple[Any, Counting, nn.Module]:
    test = TensorDataset(torch.zeros(count, 2), torch.arange(count).float())
    source = DataSource(train=test, val=None, test=test, input_shape=(2,), num_classes=0)
    components, model = Counting(source, TaskConfig()), nn.Linear(2, 2).train()
    loader = Loader(test, source, DataConfig(), device=CPU, seed=1)
    return components.evaluate(model, loader, world, Precision("off", CPU), 4), components, model


def test_a_users_own_task_gets_an_exact_mean() -> None:
    found, components, model = counting(ALONE)
    assert found.metrics == {"loss": 11.0}
    assert (found.samples, found.details) == (23, {})
    assert components.seen_training is False
    assert model.training, "and training goes on as before"


def test_a_model_in_evaluation_stays_there() -> None:
    _, components, model = counting(ALONE)
    model.eval()
    loader = Loader(components.source.test, components.source, DataConfig(), device=CPU, seed=1)  # type: ignore[arg-type]
    components.evaluate(model, loader, ALONE, Precision("off", CPU), 4)
    assert not model.training


def test_a_lower_loss_is_better_where_a_task_says_nothing() -> None:
    _, components, _ = counting(ALONE)
    assert components.score({"loss": 1.0}) > components.score({"loss": 2.0})


def test_workers_add_up_without_a_batch_of_their_own() -> None:
    def work(world: World) -> Any:
        with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced:
            found, _, _ = counting(world, count=6)
        return found.metrics, reduced.call_count

    # whether all could, how many counts there are, and the sums
    assert run_on_each_rank(4, work) == [({"loss": 2.5}, 3)] * 4


class Scarce(Counting):
    """Batches of more than two samples don't fit on rank 1."""

    def measure(self, model: nn.Module, batch: Batch) -> BatchMetrics:
        if batch.micro_batch_index and len(batch) > 2:
            raise torch.OutOfMemoryError("out of memory (played)")
        return super().measure(model, batch)


def test_out_of_memory_on_one_rank_is_known_to_all() -> None:
    def work(world: World) -> Any:
        test = TensorDataset(torch.zeros(8, 2), torch.arange(8).float())
        source = DataSource(train=test, val=None, test=test, input_shape=(2,), num_classes=0)
        loader = Loader(test, source, DataConfig(), device=CPU, seed=1)
        task, model = Scarce(source, TaskConfig()), nn.Linear(2, 2).train()
        found: list[Any] = []
        for size in (4, 2):
            try:
                found.append(task.evaluate(model, loader, world, Precision("off", CPU), size).metrics["loss"])
            except OutOfMemory as error:
                found.append(error.problem)
        return [*found, model.training]

    assert run_on_each_rank(2, work) == [["rank 1 ran out of memory: out of memory (played)", 3.5, True]] * 2


class Noisy(Counting):
    """What it measures depends on what it draws."""

    def measure(self, model: nn.Module, batch: Batch) -> BatchMetrics:
        drawn = torch.rand(()) + numpy.random.rand() + random.random()
        return BatchMetrics(drawn.double(), torch.zeros(1, dtype=torch.int64))


def test_what_a_model_draws_in_an_evaluation_does_not_depend_on_the_workers() -> None:
    def work(world: World) -> Any:
        test = TensorDataset(torch.zeros(12, 2), torch.zeros(12))
        source = DataSource(train=test, val=None, test=test, input_shape=(2,), num_classes=0)
        loader = Loader(test, source, DataConfig(), device=CPU, seed=1)
        task, model = Noisy(source, TaskConfig()), nn.Linear(2, 2)
        torch.rand(world.rank)
        return [task.evaluate(model, loader, world, Precision("off", CPU), 4).metrics["loss"] for _ in range(2)]

    [alone, again] = work(ALONE)
    assert alone == again
    assert run_on_each_rank(3, work) == [[alone, alone]] * 3


def test_a_loss_that_is_not_finite_is_told_not_hidden() -> None:
    test = TensorDataset(torch.zeros(8, 2), torch.tensor([1.0] * 7 + [float("nan")]))
    source = DataSource(train=test, val=None, test=test, input_shape=(2,), num_classes=0)
    loader = Loader(test, source, DataConfig(), device=CPU, seed=1)
    found = Counting(source, TaskConfig()).evaluate(nn.Linear(2, 2), loader, ALONE, Precision("off", CPU), 4)
    assert found.metrics["loss"] != found.metrics["loss"]


@pytest.mark.parametrize("old", RENAMED)
def test_an_earlier_name_that_nobody_calls_any_more_is_refused(old: str) -> None:
    with pytest.raises(RequestError, match=f"Mine has '{old}'") as refused:
        type("Mine", (Task,), {old: "of the user's own"})
    assert RENAMED[old] in refused.value.remedy


def test_an_earlier_name_beside_the_new_one_is_the_users_own_affair() -> None:
    type("Mine", (Task,), {"expects": "for the version before", "expected_shapes": "for this one"})
