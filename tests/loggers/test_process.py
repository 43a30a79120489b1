import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from multigpu_cli.loggers import sender as module
from multigpu_cli.loggers.sender import LoggerProcess, Position, hold_lock, list_unsent, read_position, write_position
from multigpu_cli.monitor.journal import Journal
from tests.commands.runs import interrupted_run, run_folder
from tests.support.recording_logger import read_rows
from tests.support.wait_until import wait_until

ROOT = Path(__file__).resolve().parents[2]
OWN = "tests.support.recording_logger:Recorder"
RUN = Path("run")


@pytest.fixture(autouse=True)
def here(in_tmp_path: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory is empty, and the process beside finds the tests."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def steps() -> list[int]:
    return [row["step"] for row in read_rows() if "train/loss" in row] if Path("rows.jsonl").exists() else []


def write_steps(journal: Journal, first: int, last: int) -> None:
    for step in range(first, last + 1):
        journal.write("train", step=step, loss=1.0 / step, lr=0.1)


@pytest.fixture
def warnings() -> list[str]:
    return []


def test_a_logger_that_fails_and_hangs_stops_nobody_and_loses_nothing(warnings: list[str]) -> None:
    """One run: rows arrive while it goes on; errors are told once; what hangs at the end is named, and replayed."""
    run_folder(RUN, [], seed=7)
    follower = LoggerProcess(RUN, [OWN], 1.0, warnings.append)
    with closing(Journal(RUN / "journal.jsonl", [follower])) as journal:
        journal.write("start", plan={})
        write_steps(journal, 1, 3)
        wait_until(lambda: steps() == [1, 2, 3], "rows arrive during the run")
        Path("refuse").touch()
        write_steps(journal, 4, 4)
        wait_until(lambda: read_position(RUN, OWN).error != "", "the error is kept")
        wait_until(lambda: follower._companion.relay() is None and warnings != [], "and told")
        Path("refuse").unlink()
        wait_until(lambda: 4 in steps(), "and what failed comes again")
        Path("hang").touch()
        began = time.monotonic()
        write_steps(journal, 5, 400)
        journal.write("end", status="completed", step=400, fingerprint="ab")
        assert time.monotonic() - began < 5, "writing waits for nobody"
    follower.close()
    assert time.monotonic() - began < 30, "it is given a second, and some to end"
    assert len(warnings) == 2
    assert "OSError: no answer from https://…@host/api; training continues" in warnings[0]
    assert f"397 lines of run/journal.jsonl not sent; multigpu log run --to {OWN} sends them" in warnings[1]
    assert "geheim7" not in "".join(file.read_text() for file in RUN.rglob("*") if file.is_file())
    assert steps() == [1, 2, 3, 4]

    Path("hang").unlink()
    follower = LoggerProcess(RUN, [OWN], 60, warnings.append)
    held = os.dup(follower._companion._pipe.fileno())  # as forked loader processes hold it
    follower({"event": "end", "time": 1.0, "status": "completed"})
    follower.close()
    os.close(held)
    assert steps() == list(range(1, 401))
    assert list_unsent(RUN, [OWN]) == []
    LoggerProcess(RUN, [OWN], 60, warnings.append, replay=True).close()
    assert steps() == list(range(1, 401)), "a replay of what has arrived sends nothing"
    assert len({row["open"] for row in read_rows("open")}) == 1, "and it is one run"
    assert read_rows("open")[0]["seed"] == 7
    assert all(row["parent"] for row in read_rows("open")), "each time in a session of its own"
    assert len(warnings) == 2


def test_it_sends_the_rest_and_ends_when_rank_0_is_killed() -> None:
    run_folder(RUN, [], seed=7)
    script = f"""
import time
from pathlib import Path
from multigpu_cli.loggers.sender import LoggerProcess
process = LoggerProcess(Path("run"), [{OWN!r}], 30.0, print)
print(process._companion.process.pid, flush=True)
time.sleep(600)
"""
    rank = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert rank.stdout
    follower = int(rank.stdout.readline())
    with closing(Journal(RUN / "journal.jsonl")) as journal:
        journal.write("start", plan={})
        write_steps(journal, 1, 1)
        wait_until(lambda: steps() == [1], "it follows")
        os.kill(follower, signal.SIGTERM)  # as a job's manager does to all processes
        write_steps(journal, 2, 2)
    rank.kill()
    rank.wait()
    rank.stdout.close()
    wait_until(lambda: not Path(f"/proc/{follower}/cmdline").exists(), "it ends")
    assert steps() == [1, 2]
    assert read_position(RUN, OWN).sent == (RUN / "journal.jsonl").stat().st_size


def test_a_process_that_dies_is_told_of_once_and_stops_nobody(warnings: list[str]) -> None:
    run_folder(RUN, [], seed=7)
    follower = LoggerProcess(RUN, [OWN], 60, warnings.append)
    follower._companion.process.kill()
    follower._companion.process.wait()
    with closing(Journal(RUN / "journal.jsonl", [follower])) as journal:
        journal.write("start", plan={})
        write_steps(journal, 1, 3)
        journal.write("end", status="completed", step=3, fingerprint="ab")
    follower.close()
    assert [text.partition(";")[0] for text in warnings] == [
        "the process of the loggers has ended",
        f"logger {OWN}: 5 lines of run/journal.jsonl not sent",
    ]


def test_only_one_process_sends_and_the_next_goes_on_where_it_stopped(warnings: list[str]) -> None:
    interrupted_run(RUN, seed=7)
    lines = (RUN / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (RUN / "loggers").mkdir()
    write_position(RUN, Position(OWN, sent=sum(map(len, lines[:-5]))))
    with hold_lock(RUN, OWN) as held:
        assert held
        LoggerProcess(RUN, [OWN], 60, warnings.append, replay=True).close()
        assert warnings == [f"logger {OWN}: another process is sending this run"]
        assert not Path("rows.jsonl").exists()
    LoggerProcess(RUN, [OWN], 60, warnings.append, replay=True).close()
    assert [row["step"] for row in read_rows()] == [40, 40], "of the last five lines, one trains and one evaluates"


@pytest.mark.parametrize("let_go", [True, False])
def test_the_process_of_a_killed_attempt_is_waited_for_after_the_end_of_the_next(
    let_go: bool, warnings: list[str]
) -> None:
    """The lock is let go of once the next has seen that its run has ended, or never."""
    run_folder(RUN, [], seed=7)
    with closing(Journal(RUN / "journal.jsonl")) as journal:
        journal.write("start", plan={})
        write_steps(journal, 1, 3)
    with ExitStack() as killed:
        killed.enter_context(hold_lock(RUN, OWN))

        def warn(text: str) -> None:
            warnings.append(text)
            if let_go:
                killed.close()

        process = LoggerProcess(RUN, [OWN], 60 if let_go else 0.5, warn)
        process({"event": "end", "time": 1.0, "status": "completed"})
        process.close()
    assert steps() == ([1, 2, 3] if let_go else [])
    assert warnings[0] == f"logger {OWN}: another process is sending this run; waiting; training continues"
    missing = f"logger {OWN}: 4 lines of run/journal.jsonl not sent; multigpu log run --to {OWN} sends them"
    assert warnings[1:] == ([] if let_go else [missing])


@pytest.mark.parametrize(("status", "most"), [("completed", 9.0), ("stopped", 5.0), ("failed", 0.0)])
def test_how_long_the_end_of_a_run_waits(
    status: str, most: float, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that is played: nobody waits here."""
    run_folder(RUN, [], seed=7)
    clock = [100.0]
    process = LoggerProcess(RUN, [OWN], 9.0, warnings.append, alive=lambda: clock.append(clock[-1] + 0.5))
    monkeypatch.setattr(time, "monotonic", lambda: clock[-1])
    monkeypatch.setattr(process._companion.process, "poll", lambda: None)
    process({"event": "end", "time": 1.0, "status": status})
    process.close()
    waited = clock[-1] - 100
    assert most <= waited <= most + module._MARGIN + 0.5 if most else waited == 0
    assert json.loads(json.dumps(warnings)) == []
