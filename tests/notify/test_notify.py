"""--notify CMD: when the program runs, what it is told, and what its failure is; with real programs and processes."""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import main_multi_gpu
from multigpu_cli import engine
from multigpu_cli.faults.rank_exits import RankPosition
from multigpu_cli.faults.root_cause import hang_error
from multigpu_cli.monitor.journal import read_events
from multigpu_cli.notify import process
from tests.support.run_training import run_training
from tests.support.wait_until import wait_until

pytestmark = pytest.mark.usefixtures("in_tmp_path")
RECORD = 'echo "$MULTIGPU_REASON|$MULTIGPU_EXIT_CODE|$MULTIGPU_RUN_DIR|$MULTIGPU_MESSAGE" >> told; echo printed'
HANG = hang_error([RankPosition(0, 7, "forward", "")], 1, 600, None)


@pytest.fixture
def command() -> str:
    """A program that writes what it is told into a file."""
    Path("record.sh").write_text(RECORD)
    return f"sh '{Path('record.sh').absolute()}'"


def told() -> list[str]:
    return Path("told").read_text().splitlines() if Path("told").exists() else []


def journal(run: Path, *events: dict[str, Any]) -> None:
    run.mkdir(exist_ok=True)
    (run / "logs").mkdir(exist_ok=True)
    with open(run / "journal.jsonl", "a") as file:
        file.writelines(json.dumps({"time": 1.0} | event) + "\n" for event in events)


@pytest.mark.parametrize(
    ("status", "error", "expected"),
    [
        ("completed", "", "completed|0|{run}|completed at step 9"),
        ("stopped", "", "stopped|75|{run}|stopped at step 9"),
        ("failed", "ValueError: planted", "failed|1|{run}|ValueError: planted"),
        ("failed", f"TrainingError: {HANG.problem.splitlines()[0]}", "stalled|1|{run}|TrainingError: no progress for"),
        (None, "", "died||{run}|the process of rank 0 is gone"),
    ],
)
def test_the_end_is_told_with_its_reason(status: str | None, error: str, expected: str, command: str) -> None:
    run, ended, notes = Path("run").absolute(), threading.Event(), list[str]()
    journal(run, {"event": "end", "status": "failed", "step": 1})  # of an earlier attempt
    begin = (run / "journal.jsonl").stat().st_size
    (run / "summary.json").write_text(json.dumps({"status": status, "error": error}))
    journal(run, *([{"event": "end", "status": status, "step": 9}] if status else []))
    ended.set()
    process.follow(run, ["sh", "record.sh"], begin, ended, notes.append)
    assert [line.startswith(expected.format(run=run)) for line in told()] == [True], told()
    assert notes == []
    assert (run / "logs" / "notify.log").read_text() == "printed\n"


def test_faults_in_a_row_are_one_command_and_those_of_notify_none(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_LOOK", 0.01)
    run, ended, notes = Path("run").absolute(), threading.Event(), list[str]()
    journal(run)
    following = threading.Thread(target=process.follow, args=(run, ["sh", "record.sh"], 0, ended, notes.append))
    following.start()
    journal(run, {"event": "fault", "kind": "nonfinite", "action": "first"})
    wait_until(lambda: len(told()) == 1, "the first fault")
    journal(run, {"event": "fault", "kind": "notify", "action": "its own"})
    journal(run, *({"event": "fault", "kind": "nonfinite", "action": f"fault {number}"} for number in range(3)))
    journal(run, {"event": "end", "status": "completed", "step": 9})
    ended.set()
    following.join()
    words = [(line.split("|")[0], line.split("|")[-1]) for line in told()]
    assert words == [("fault", "first"), ("fault", "fault 2 (and 2 more before)"), ("completed", "completed at step 9")]


def test_a_training_does_not_wait_and_a_command_that_fails_is_a_fault_in_its_journal() -> None:
    Path("fail.sh").write_text("exit 3")
    ended = run_training(2, save_dir="run", max_steps=3, batch_size=8, notify=f"sh {Path('fail.sh').absolute()}")
    assert (ended.error, ended.summary["status"]) == ("", "completed")
    (fault,) = [event for event in read_events("run/journal.jsonl") if event["event"] == "fault"]
    assert fault["kind"] == "notify"
    assert "returned non-zero exit status 3" in fault["action"]


def test_a_run_whose_process_is_killed_is_told_of(command: str) -> None:
    def prepare() -> None:
        train_step = engine.train_step

        def step(run: Any, layout: Any, batches: Any) -> Any:
            if layout.step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return train_step(run, layout, batches)

        engine.train_step = step  # type: ignore[assignment]

    ended = run_training(1, save_dir="run", max_steps=9, batch_size=8, notify=command, prepare=prepare)
    assert ended.killed == [0]
    wait_until(lambda: len(told()) == 1, "the news")
    assert told()[0].startswith(f"died||{Path('run').absolute()}|")


def test_a_command_without_an_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_LIMIT", 0.05)
    run, ended, notes = Path("run"), threading.Event(), list[str]()
    journal(run)
    ended.set()
    process.follow(run, ["sleep", "600"], 0, ended, notes.append)
    assert "timed out" in notes[0]


@pytest.mark.parametrize("given", ["no-such-program-anywhere now", "'never closed", "' '"])
def test_a_program_that_is_missing_is_refused_before_training(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_multi_gpu.run(["--notify", given, "--save-dir", "run"]) == 2
    assert "--notify" in capsys.readouterr().err
    assert not Path("run").exists()


@pytest.mark.parametrize("address", ["curl https://me:secret@host/hook", "/bin/sh -c 'curl http://me:secret@h'"])
def test_notify_refuses_an_address_with_a_password(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The setting is written into config.yaml, and into weights that people publish."""
    assert main_multi_gpu.run(["--notify", address, "--dry-run"]) == 2
    shown = capsys.readouterr().err
    assert "--notify: an address with a password" in shown
    assert "secret" not in shown
