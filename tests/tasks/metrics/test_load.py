"""torchmetrics, which is imported where it is asked for: here a stand-in that is called as its classes are."""

from pathlib import Path

import pytest

from multigpu_cli.monitor.history import load_history
from tests.support.run_training import run_training

STAND_IN = """
import torch

class Metric:
    sync_on_compute = True
    def __init__(self, num_classes, average="micro"):
        assert (num_classes, average) == (3, "macro")
        self.reset()
    def reset(self):
        self.hits = torch.tensor(0)
        self.seen = torch.tensor(0)
    def modules(self):
        return [self]
    def update(self, preds, target):
        self.hits += (preds.argmax(1) == target).sum()
        self.seen += len(target)
    def compute(self):
        if self.sync_on_compute:
            torch.distributed.barrier()  # nobody else comes
        return self.hits / self.seen

class F1Score(Metric):
    def __new__(cls, task, num_classes=None, average="micro"):
        assert task == "multiclass"
        return super().__new__(cls)
    def __init__(self, task, num_classes=None, average="micro"):
        super().__init__(num_classes, average)
"""


def test_its_classes_are_told_of_ours_and_exchange_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "torchmetrics").mkdir()
    (tmp_path / "torchmetrics/__init__.py").write_text(STAND_IN)
    ended = run_training(
        2,
        metric=["torchmetrics:F1Score"],
        sets=["metric.args.f1_score={average: macro}"],
        best="val_f1_score:max",
        early_stopping_patience=1,
        epochs=2,
        batch_size=10,
        save_dir="run",
    )
    assert ended.error == ""
    evals = load_history(Path("run")).evals.values()
    assert evals
    assert all(event["f1_score"] == pytest.approx(event["accuracy"]) for event in evals)
