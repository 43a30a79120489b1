"""Classes of torchmetrics: they are told of ours, and find the same bits on any number of workers."""

import json
from pathlib import Path
from typing import Any

import pytest

from multigpu_cli.monitor.history import load_history
from tests.support.run_training import run_training

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
