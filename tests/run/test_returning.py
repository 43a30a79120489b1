"""What the next attempt finds of the one before, and what it journals of the gap."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from multigpu_cli.monitor import journal
from multigpu_cli.run.returning import note_recovery
from multigpu_cli.runtime.elastic import Last
from tests.trained import trained

RUN = {"global_batch_size": 20, "batch_size": 5, "epochs": 20, "checkpoint_every": "1000", "save_dir": "run"}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def events(kind: str) -> list[dict[str, Any]]:
    return [event for event in journal.read("run/journal.jsonl") if event["event"] == kind]


def test_after_a_stop_nothing_is_done_again_and_the_gap_is_journalled(tmp_path: Path) -> None:
    agent = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_ERROR_FILE": str(tmp_path / "attempt_0" / "0" / "error.json")}
    stopped = trained(2, **RUN, environ=agent | {"OWN_DEED": "1:4:SIGTERM", "OWN_PAUSE": "0.05"})
    assert stopped.summary["status"] == "stopped"
    assert events("recovery") == []
    ended = trained(2, **RUN, environ=agent)  # the agent does not count an attempt that a new node caused
    assert ended.summary["status"] == "completed"
    [found] = events("recovery")
    assert (found["step"], found["lost_steps"]) == (stopped.summary["steps"] + 1, 0)
    assert found["cause"] == f"stopped in good order at step {stopped.summary['steps']}"
    assert 0 < found["seconds"] < 60
    [fault] = events("fault")
    assert fault["action"].startswith("attempt 2 of this launch: stopped in good order")


def test_steps_that_are_done_again_are_counted_once() -> None:
    written: list[dict[str, Any]] = []
    run: Any = SimpleNamespace(
        before=Last("rank 2 ended without a word", 12, time.time() - 8),
        progress=SimpleNamespace(step=11),
        journal=SimpleNamespace(write=lambda kind, **fields: written.append(fields)),
        console=SimpleNamespace(note=lambda text: None),
    )
    note_recovery(run)
    note_recovery(run)
    [found] = written
    assert (found["step"], found["lost_steps"]) == (11, 2), "steps 11 and 12"
    assert 8 <= found["seconds"] < 9
