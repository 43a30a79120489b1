"""What tasks and metrics count for each class: as little as needed, and nothing where an output is no number."""

import json
from collections.abc import Callable, Iterator
from math import isnan, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from multigpu_cli.commands.report.report import write_report
from multigpu_cli.config.schema import DataConfig, MetricConfig, TaskConfig
from multigpu_cli.config.sources import resolve
from multigpu_cli.data.loader import Batch, Loader
from multigpu_cli.data.source import DataSource
from multigpu_cli.distributed.world import World
from multigpu_cli.language.task import LanguageModel
from multigpu_cli.metrics.load import load_metrics
from multigpu_cli.runtime.precision import Precision
from multigpu_cli.tasks.own_loss import Criterion
from multigpu_cli.tasks.supervised import LARGEST_TABLE, Classification, MultiLabel, count_classes
from tests.support.ranks import run_on_each_rank
from tests.support.run_training import fork_ranks
from tests.support.world import CPU
from train_multi_gpu import train

MANY = 10_000
same = nn.Identity()


def many(split: str) -> TensorDataset:
    """A few samples of ten thousand classes, the last of which is there."""
    generator = torch.Generator().manual_seed(len(split))
    targets = torch.randint(MANY, (40,), generator=generator)
    targets[0] = MANY - 1
    return TensorDataset(torch.randn(40, 4, generator=generator), targets)


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that an operation returns."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        parts = found if isinstance(found, tuple | list) else [found]
        self.size = max([self.size, *(part.numel() for part in parts if isinstance(part, Tensor))])
        return found


METRICS = ("macro_f1", "macro_accuracy", "top5_accuracy")


def evaluate_many(world: World) -> tuple[int, list[str]]:
    """The largest tensor of an evaluation, and the names of its tables."""
    data = many("test")
    source = DataSource(train=data, val=None, test=data, input_shape=(4,), num_classes=MANY)
    task = Classification(source, TaskConfig())
    task.own_metrics = load_metrics(MetricConfig(names=METRICS), source, "classification")
    loader, precision = Loader(data, source, DataConfig(), device=CPU, seed=1), Precision("off", CPU)
    with Largest() as largest:
        found = task.evaluate(nn.Linear(4, MANY), loader, world, precision, 8)
    return largest.size, list(found.details)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_evaluation_of_ten_thousand_classes_makes_no_table(workers: int) -> None:
    for size, tables in run_on_each_rank(workers, evaluate_many):
        assert 8 * MANY <= size < 100 * MANY, "logits, but no classes²"
        assert tables == ["per_class"]


def test_a_run_of_ten_thousand_classes_ends_with_a_count_for_each(tmp_path: Path) -> None:
    flags = {"data": f"{__name__}:many", "max_steps": 2, "save_dir": str(tmp_path / "run"), "batch_size": 8}
    fork_ranks(2, lambda rank: train(resolve(flags | {"multi_gpu": "ddp"}, [], None), screen="quiet"), seconds=120)
    file = tmp_path / "run" / "summary.json"
    summary = json.loads(file.read_text())
    assert file.stat().st_size < 3_000_000
    assert "confusion" not in summary
    assert [len(summary["per_class"]), sum(row["support"] for row in summary["per_class"])] == [MANY, 40]
    assert summary["per_class"][-1]["support"] >= 1
    report = write_report([str(file.parent)], None)
    assert report.page.exists()
    assert "confusion" not in {file.stem for file in report.pictures}


@pytest.mark.parametrize("classes", [LARGEST_TABLE, LARGEST_TABLE + 1])
def test_a_table_ends_at_a_number_of_classes(classes: int) -> None:
    generator = torch.Generator().manual_seed(1)
    outputs, targets = torch.randn(999, classes, generator=generator), torch.randint(classes, (999,))
    found = count_classes(outputs, targets, table=True)
    predicted = outputs.argmax(1)
    expected = [torch.bincount(each, minlength=classes) for each in (targets[predicted == targets], predicted, targets)]
    assert torch.equal(found[:3], torch.stack(expected))
    assert found.shape == (3 if classes > LARGEST_TABLE else 3 + classes, classes)
    assert torch.equal(count_classes(outputs, targets), found[:3])


def build(task: Callable[..., Any], classes: int, *more: Any) -> Any:
    data = TensorDataset(torch.zeros(1, 3), torch.zeros(1))
    return task(DataSource(train=data, val=None, test=None, input_shape=(3,), num_classes=classes), TaskConfig(), *more)


def list_tasks() -> Iterator[Any]:
    classes = torch.tensor([0, 1, 2, 0])
    yield pytest.param(build(Criterion, 3, cross_entropy), torch.eye(4, 3), classes, id="criterion")
    yield pytest.param(build(MultiLabel, 0), torch.eye(4, 3) - 0.5, torch.eye(4, 3), id="multi-label")
    tokens = classes.view(2, 2)
    yield pytest.param(build(LanguageModel, 3), torch.eye(4, 3).view(2, 2, 3), tokens, id="language-model")


@pytest.mark.parametrize(("task", "outputs", "targets"), [*list_tasks()])
def test_no_task_is_right_where_an_output_is_no_number(task: Any, outputs: Tensor, targets: Tensor) -> None:
    def measure() -> list[float]:
        counts = task.measure(same, Batch(outputs, targets, torch.arange(len(targets)), 0)).counts
        return list(task.metrics(counts, targets.numel()).values())

    assert min(measure()) > 0
    outputs.view(-1)[-1] = nan
    assert all(map(isnan, measure())), measure()
