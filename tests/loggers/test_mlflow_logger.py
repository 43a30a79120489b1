"""MLflow for real, on a sqlite store of its own: with the whole way through the process beside, and in a fork."""

import sqlite3
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

from multigpu_cli.loggers.sender import LoggerProcess, follow, read_position
from tests.commands.runs import interrupted_run
from tests.support.fork import exit_code

ROOT = Path(__file__).resolve().parents[2]
RUN = Path("run")


def read_table(question: str) -> list[Any]:
    with sqlite3.connect("mlflow.db") as file:
        rows = file.execute(question).fetchall()
    file.close()
    return rows


def everything() -> list[list[Any]]:
    return [
        sorted(read_table(f"select {columns} from {table}"))
        for table, columns in (
            ("metrics", "run_uuid, key, step, timestamp, value"),
            ("params", "run_uuid, key, value"),
            ("tags", "run_uuid, key, value"),
            ("runs", "run_uuid, name, status"),
        )
    ]


@pytest.fixture
def store(in_tmp_path: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    for name in ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID", "MLFLOW_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("store")
def test_a_replay_makes_one_run_and_a_second_one_changes_nothing() -> None:
    assert exit_code(replay_twice) == 0


def replay_twice() -> None:
    """In a fork, which imports mlflow once."""
    warnings.simplefilter("default")  # SQLAlchemy's are no errors there
    interrupted_run(RUN, seed=7, epochs=10)
    replay(again=False)
    assert read_position(RUN, "mlflow").sent == (RUN / "journal.jsonl").stat().st_size
    first = everything()
    losses = read_table("select step, value, timestamp from metrics where key = 'train/loss' order by step")
    assert [(step, value) for step, value, _ in losses] == [(step, pytest.approx(2 / step)) for step in range(1, 41)]
    assert losses[0][2] == 1001000, "at the time of the journal"
    assert read_table("select name, status from runs") == [("run", "FINISHED")]
    assert ("seed", "7") in read_table("select key, value from params")
    assert dict(read_table("select key, value from tags"))["multigpu.fingerprint"] == "ab" * 32
    replay(again=True)
    assert everything() == first


def replay(*, again: bool) -> None:
    notes: list[str] = []
    request = {"run": str(RUN), "loggers": ["mlflow"], "wait": 240, "again": again, "replay": True}
    follow(request, threading.Event(), notes.append)
    assert notes == []


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_a_setting_that_changed_on_resume_is_a_tag_and_a_lost_store_gets_everything() -> None:
    interrupted_run(RUN, seed=7, epochs=10)
    LoggerProcess(RUN, ["mlflow"], 240, print, replay=True).close()
    text = (RUN / "config.yaml").read_text()
    (RUN / "config.yaml").write_text(text.replace("epochs: 10", "epochs: 12"))
    LoggerProcess(RUN, ["mlflow"], 240, print, replay=True).close()
    assert ("epochs", "10") in read_table("select key, value from params")
    assert ("multigpu.config.epochs", "12") in read_table("select key, value from tags")
    count = read_table("select count(*) from metrics")
    Path("mlflow.db").unlink()
    LoggerProcess(RUN, ["mlflow"], 240, print, replay=True).close()
    assert read_table("select count(*) from metrics") == count, "the position is of another store, and does not count"
