"""Runs in order, the best first."""

from pathlib import Path

import pytest

from multigpu_cli.commands.status import choose_key, collect_figures, explain_order, order_runs, read_figures
from multigpu_cli.errors import RequestError
from multigpu_cli.monitor.history import History
from tests.commands.runs import PLAN, event, interrupted_run, lines, run_folder


def test_a_summary_gives_its_numbers() -> None:
    summary = {
        "status": "completed",
        "steps": 40,
        "final": {"val_loss": 0.5, "val_accuracy": None, "train_loss": "NaN"},
        "best": {"epoch": 3, "loss": 0.4, "val_loss": 0.4},
        "step_ms": {"p50": 12.5, "p95": None},
        "peak_memory_bytes": [5, 7],
        "confusion": [[1]],
    }
    found = dict(collect_figures(summary, History()))
    assert found.pop("train_loss") != 0.5
    assert found == {
        "steps": 40,
        "val_loss": 0.5,
        "best_epoch": 3,
        "best_val_loss": 0.4,
        "step_ms_p50": 12.5,
        "peak_memory_bytes": 7,
    }


def test_a_run_at_work_is_compared_by_its_last_evaluation(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "a", [event(1000, "start", plan=PLAN), *lines(1, 10, 1000)])
    found = read_figures(run)
    assert (found["val_accuracy"], found["val_loss"], found["train_loss"]) == (1 - 1 / 8, 2.5 / 8, 0.2)
    assert found["samples_per_second"] == 1010
    assert read_figures(interrupted_run(tmp_path / "b"))["test_accuracy"] == 0.975


@pytest.mark.parametrize(
    ("key", "order", "words"),
    [
        ("val_loss", [1, 0, 2, 3], "by val_loss, lowest first"),
        ("val_accuracy", [0, 1, 2, 3], "by val_accuracy, highest first"),
        ("samples_per_second", [1, 0, 2, 3], "by samples_per_second, highest first"),
        ("step_ms_p50", [0, 1, 2, 3], "by step_ms_p50, lowest first"),
    ],
)
def test_the_name_says_what_is_better(key: str, order: list[int], words: str) -> None:
    """And a run without the number, or with NaN, is never the best."""
    runs = [
        {"val_loss": 0.5, "val_accuracy": 0.9, "samples_per_second": 5, "step_ms_p50": 1},
        {"val_loss": 0.4, "val_accuracy": 0.8, "samples_per_second": 9, "step_ms_p50": 2},
        dict.fromkeys(("val_loss", "val_accuracy", "samples_per_second", "step_ms_p50"), float("nan")),
        {},
    ]
    assert order_runs(runs, key) == order
    assert explain_order(key) == words


def test_an_unknown_key_names_a_near_one() -> None:
    with pytest.raises(RequestError, match=r"--sort-by val_acuracy: no run has this metric\n.*'val_accuracy'"):
        order_runs([{"val_accuracy": 1.0, "val_loss": 1.0}], "val_acuracy")
    with pytest.raises(RequestError, match="runs that have an evaluation"):
        order_runs([{}], "val_loss")


def test_the_usual_key_is_one_that_most_runs_have() -> None:
    assert choose_key([{"val_loss": 1.0}, {"val_loss": 1.0, "val_accuracy": 1.0}]) == "val_loss"
    assert choose_key([{"train_loss": 1.0, "val_accuracy": 1.0}]) == "val_accuracy"
    assert choose_key([{"steps": 1.0}]) is None
