"""The example of a logger: one run there, on one worker and on two, through a kill and a resume."""

import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from multigpu_cli.monitor.history import load_history
from tests.support.die_at_third_checkpoint import die_at_third_checkpoint
from tests.support.run_training import run_training

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "own_logger.py"


def read_table(question: str) -> list[Any]:
    with sqlite3.connect("runs.db") as file:
        rows = file.execute(question).fetchall()
    file.close()
    return rows


def test_it_has_at_most_thirty_lines() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 30


@pytest.mark.usefixtures("in_tmp_path")
@pytest.mark.parametrize(("before", "after"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_killed_and_resumed_on_another_number_of_workers_it_has_every_row_of_one_run(
    before: int, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(EXAMPLE, ".")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    flags: dict[str, Any] = {
        "logger": ["own_logger:SQLite"],
        "save_dir": "run",
        "batch_size": 10,
        "global_batch_size": 20,
        "epochs": 4,
        "log_interval": 1,
    }
    assert run_training(before, prepare=die_at_third_checkpoint, **flags).killed
    assert Path("run/checkpoints/step_00000006/manifest.json").is_file()
    ended = run_training(after, **flags)
    assert (ended.error, ended.summary["resumed_from"]) == ("", "run/checkpoints/step_00000006")
    history = load_history(Path("run"))
    assert history.attempts[0].reached > 6, "the first attempt came further than its checkpoint"
    assert len(read_table("select distinct run from rows")) == 1
    assert read_table("select value from runs where name = 'epochs'") == [("4",)]
    losses = dict(read_table("select step, value from rows where name = 'train/loss'"))
    assert losses == {step: pytest.approx(event["loss"], rel=1e-3) for step, event in history.train.items()}
    assert set(losses) == set(range(1, 13))
    accuracies = dict(read_table("select step, value from rows where name = 'val/accuracy'"))
    assert accuracies == {step: event["accuracy"] for (step, split), event in history.evals.items() if split == "val"}
