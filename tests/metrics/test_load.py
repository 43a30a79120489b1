"""What --metric and --best name; classes of torchmetrics are told of ours, and find the same bits on any workers."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from multigpu_cli.config.schema import MetricConfig
from multigpu_cli.errors import RequestError
from multigpu_cli.metrics import load
from multigpu_cli.metrics.load import Metrics
from multigpu_cli.monitor.history import load_history
from multigpu_cli.runtime.precision import Precision
from tests.metrics.test_meter import HERE, make_task
from tests.support.run_training import run_training
from tests.support.world import ALONE, CPU

RUN: dict[str, Any] = {
    "metric": ["torchmetrics:F1Score", "torchmetrics:AUROC", "own:worst", "own:right"],
    "sets": ["metric.args.f1_score={average: micro}"],
    "best": "val_f1_score:max",
    "exact": True,
    "epochs": 2,
    "batch_size": 5,
    "global_batch_size": 20,
}
OWN = """
from torchmetrics import Accuracy, MinMaxMetric

def right(outputs, targets):
    return (outputs.argmax(1) == targets).float()

class worst(MinMaxMetric):
    def __init__(self, num_classes):
        super().__init__(Accuracy(task="multiclass", num_classes=num_classes, average="micro"))
    def compute(self):
        return super().compute()["min"]
"""


def test_its_classes_exchange_nothing_and_are_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchmetrics  # noqa: F401 - once rather than in each forked rank

    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    found = []
    for workers in (1, 2):
        ended = run_training(workers, **RUN | {"save_dir": f"on{workers}"})
        assert ended.summary["status"] == "completed", ended
        evals = load_history(Path(f"on{workers}")).evals.values()
        for event in evals:
            assert event["f1_score"] == pytest.approx(event["accuracy"]), "as with one label for each sample"
            assert event["worst"] == pytest.approx(event["accuracy"]), "a metric within a metric"
            assert event["right"] == pytest.approx(event["accuracy"]), "a function beside them"
        found.append([[event[name] for name in ("f1_score", "auroc", "worst", "right")] for event in evals])
    assert json.dumps(found[0]) == json.dumps(found[1])
    assert len(found[0]) > 2


def make_part(config: MetricConfig) -> Metrics:
    task, _ = make_task(9, ())
    spec = SimpleNamespace(config=SimpleNamespace(metric=config), source=task.source, task="classification")
    return Metrics(cast(Any, spec), ALONE)


def make_components(config: MetricConfig, *, val: bool = True, test: bool = True) -> Any:
    """Those of a task that evaluates in its own way."""
    return SimpleNamespace(
        config=SimpleNamespace(metric=config), spec=SimpleNamespace(task="own"), evaluates_in_batches=False, score=None,
        loaders=SimpleNamespace(val=val or None, test=test or None),
    )  # fmt: skip


@pytest.mark.parametrize(("side", "word", "score"), [("max", "greatest", 3.0), ("min", "lowest", -3.0)])
def test_the_best_weights_have_the_greatest_or_the_lowest_number(side: str, word: str, score: float) -> None:
    config = MetricConfig(names=("macro_f1", f"{HERE}:lead"), best=f"val_lead:{side}")
    said = f"macro_f1, lead ({HERE}:lead); the best weights have the {word} val_lead"
    assert make_part(config).plan_notes() == {"metrics": said}
    components = make_components(config := MetricConfig(best=f"val_lead:{side}"))
    make_part(config).built(components)
    assert components.score({"loss": 1.0, "lead": 3.0}) == [score]
    with pytest.raises(RequestError, match=f"--best val_lead:{side}: an evaluation has no 'val_lead'"):
        components.score({"loss": 1.0})
    make_part(MetricConfig()).built(components := make_components(MetricConfig()))
    assert components.score is None, "the task's own"


@pytest.mark.parametrize(
    ("best", "remedy"),
    [
        ("lead:max", "did you mean 'val_lead'? (val_lead, val_loss)"),
        ("val_leed:max", "did you mean 'val_lead'? (val_lead, val_loss)"),
        ("x:max", "one of: val_lead, val_loss"),
    ],
)
def test_a_best_number_that_is_none_is_answered_with_those_that_are(best: str, remedy: str) -> None:
    load._check_best_name("val_lead:max", ["loss", "lead"])
    with pytest.raises(RequestError, match=f"--best {best}: an evaluation has no ") as refused:
        load._check_best_name(best, ["loss", "lead"])
    assert refused.value.remedy == remedy


@pytest.mark.parametrize(
    ("names", "best", "val", "test", "words"),
    [
        ((), "val_lead:max", False, True, "--best val_lead:max: the data has no validation split"),
        (("auroc",), None, False, False, "--metric auroc: the data has neither a validation nor a test split"),
        (("auroc",), None, False, True, "--metric auroc: --task own evaluates in its own way"),
        (("auroc",), None, True, False, "--metric auroc: --task own evaluates in its own way"),
    ],
)
def test_an_evaluation_that_has_no_use_for_them_is_said(
    names: tuple[str, ...], best: str | None, val: bool, test: bool, words: str
) -> None:
    config = MetricConfig(names=names, best=best)
    with pytest.raises(RequestError, match=words):
        make_part(config).built(make_components(config, val=val, test=test))


def note_sizes(outputs: Tensor, targets: Tensor) -> Tensor:
    SIZES.append(len(outputs))
    return torch.ones(len(outputs))


SIZES: list[int] = []


@pytest.mark.parametrize("sharded", [False, True])
def test_metrics_are_tried_on_two_samples(sharded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each pass communicates, in a way that does not wait for a vote; also without a sample that counts."""
    ways: list[str] = []
    for way in ("run_in_step", "run_on_all_ranks"):
        monkeypatch.setattr(load, way, lambda world, work, way=way: (ways.append(way), work())[1])
    task, loader = make_task(9, (f"{__name__}:note_sizes",))
    monkeypatch.setattr(task, "units", lambda batch: 0)
    components = SimpleNamespace(
        task=task, world=ALONE, strategy=SimpleNamespace(sharded=sharded), loaders=SimpleNamespace(train=loader),
        state=SimpleNamespace(model=nn.Linear(7, 7), precision=Precision("off", CPU)),
    )  # fmt: skip
    SIZES.clear()
    assert load._try_metrics(cast(Any, components)) == ["loss", "accuracy", "note_sizes"]
    assert (SIZES, ways) == ([2], ["run_in_step" if sharded else "run_on_all_ranks", "run_on_all_ranks"])
