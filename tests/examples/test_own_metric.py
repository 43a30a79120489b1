"""examples/own_metric.py on one and two workers, killed and resumed: the same bits, which scikit-learn confirms."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import cohen_kappa_score

from multigpu_cli.monitor.history import load_history
from tests.support.die_at_third_checkpoint import die_at_third_checkpoint
from tests.support.run_training import run_training
from tests.support.user_code import tensors

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_metric.py"
FLAGS: dict[str, Any] = {
    "metric": ["own_metric:margin", "own_metric:Kappa"],
    "best": "val_kappa:max",
    "epochs": 4,
    "batch_size": 10,
    "global_batch_size": 20,
    "exact": True,
}


def evaluations(folder: str) -> list[dict[str, Any]]:
    found = load_history(Path(folder)).evals
    return [{name: value for name, value in found[place].items() if name != "time"} for place in sorted(found)]


def test_the_example_has_thirty_lines_at_most() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 30


def test_any_number_of_workers_and_a_death_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(EXAMPLE, tmp_path)
    alone = run_training(**FLAGS, save_dir="alone")
    assert alone.error == ""
    assert run_training(2, **FLAGS, save_dir="two", prepare=die_at_third_checkpoint).killed
    resumed = run_training(**FLAGS, save_dir="two")
    assert resumed.error == ""
    assert resumed.summary["resumed_from"]
    assert len(evaluations("alone")) == 5
    assert evaluations("alone") == evaluations("two")
    assert alone.summary["final"] == resumed.summary["final"]
    best = max((line for line in evaluations("alone") if line["split"] == "val"), key=lambda line: line["kappa"])
    assert alone.summary["best"]["epoch"] == best["epoch"]
    weights = torch.load("alone/best.pt", weights_only=True)
    assert weights["metrics"]["val_kappa"] == best["kappa"]
    assert alone.summary["final"]["test_kappa"] == pytest.approx(_kappa_of_best(weights["model"]))


def _kappa_of_best(weights: dict[str, torch.Tensor]) -> float:
    from tests.support.user_code import net

    model = net((6,), 3)
    model.load_state_dict(weights)
    inputs, targets = tensors("test", 42).tensors
    with torch.no_grad():
        return float(cohen_kappa_score(targets, model.eval()(inputs).argmax(1)))
