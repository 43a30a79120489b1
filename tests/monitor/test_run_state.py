"""logs/state.json: what it says, when it is written, and that nothing waits for it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from multigpu_cli.commands.status import read_status
from multigpu_cli.faults.watchdog import Watchdog
from multigpu_cli.monitor import run_state
from multigpu_cli.monitor.run_state import STATE, RunState, read_process
from tests.support.run_training import run_training
from tests.support.wait_until import wait_until
from tests.support.world import ALONE


@pytest.fixture
def watchdog() -> Watchdog:
    return Watchdog(ALONE, 600, lambda error: None)  # its thread is not at work


def read(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / STATE).read_text())) if (run / STATE).exists() else {}


def says(run: Path, phase: str, step: int) -> Callable[[], bool]:
    return lambda: (read(run).get("phase"), read(run).get("step")) == (phase, step)


def test_it_follows_what_the_watchdog_is_told(
    tmp_path: Path, watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_state, "_INTERVAL", 0.01)
    with closing(RunState(tmp_path, watchdog.own, lambda: None, 0)) as state:
        wait_until(says(tmp_path, "starting", 0), "starting")
        for phase, name in [("forward", "training"), ("evaluating", "evaluating"), ("saving", "saving")]:
            watchdog.set_position(3, phase)
            wait_until(says(tmp_path, name, 3), name)
        state.ending = True
        wait_until(says(tmp_path, "ending", 3), "ending")
    found = read(tmp_path)
    assert found.keys() == {"phase", "step", "time", "pid", "host", "started", "launcher", "launcher_started"}
    assert (found["pid"], found["host"]) == (os.getpid(), os.uname().nodename)
    assert found["started"] == read_process(os.getpid())[1]
    assert (found["launcher"], found["launcher_started"]) == (0, 0), "nobody starts this run again"
    assert [file.name for file in (tmp_path / STATE).parent.iterdir()] == ["state.json"], "no draft is left"


def test_ten_thousand_steps_within_one_interval_are_one_write(
    tmp_path: Path, watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_state, "_INTERVAL", 600)
    with closing(RunState(tmp_path, watchdog.own, lambda: None, 0)):
        wait_until(says(tmp_path, "starting", 0), "the first state")
        first = (tmp_path / STATE).stat().st_ino
        for step in range(10_000):
            watchdog.set_position(step, "forward")
        assert (tmp_path / STATE).stat().st_ino == first
    assert says(tmp_path, "training", 9_999)(), "the last one is written at the end"


def test_a_disk_that_refuses_is_tried_again_and_a_folder_of_another_run_is_left_alone(
    tmp_path: Path, watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_state, "_INTERVAL", 0.01)
    (tmp_path / STATE).mkdir(parents=True)  # which no file replaces
    owners, tries = [True], list[bool]()

    def check_owner() -> None:
        tries.append(owners[0])
        if not owners[0]:
            raise OSError("it belongs to another run")

    def wait_for_tries() -> None:
        before = len(tries)
        wait_until(lambda: len(tries) >= before + 2, "one that began and ended")

    with closing(RunState(tmp_path, watchdog.own, check_owner, 0)):
        wait_for_tries()
        owners[0] = False
        wait_for_tries()
        (tmp_path / STATE).rmdir()
        wait_for_tries()
        assert list((tmp_path / "logs").iterdir()) == [], "neither a draft nor a state"
        owners[0] = True
        wait_until(says(tmp_path, "starting", 0), "a state")


def test_a_process_that_is_gone_has_no_start() -> None:
    with subprocess.Popen(["sleep", "600"]) as other:
        assert (read_process(other.pid)[1] or 0) >= (read_process(os.getpid())[1] or 0) > 0
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert read_process(other.pid) == ("", None), "nobody has waited for it yet"
    assert read_process(other.pid) == ("", None)


@pytest.mark.slow
def test_a_run_that_its_launcher_starts_again_is_not_dead(tmp_path: Path) -> None:
    """From the end of rank 0 until another takes the lock, by the launcher, as long as that lives."""
    flags = "--multi-gpu ddp --nproc-per-node 2 --max-restarts 1 --max-steps 200 --checkpoint-every 5 --log-interval 1"
    command = [sys.executable, "main_multi_gpu.py", *flags.split(), "--batch-size", "16", "--save-dir", str(tmp_path)]
    phases, killed = list[str](), False
    with subprocess.Popen([*command, "--quiet"], env=os.environ | {"OMP_NUM_THREADS": "1"}) as launcher:
        while launcher.poll() is None:
            if (tmp_path / "journal.jsonl").exists():
                status = read_status(tmp_path, time.time())
                phases += [status.phase] * (phases[-1:] != [status.phase])
                if not killed and status.step > 10 and (killed := True):
                    os.kill(read(tmp_path)["pid"], signal.SIGKILL)
            time.sleep(0.02)
    assert launcher.returncode == 0
    again = phases.index("restarting")
    assert phases[again + 1] == "starting"
    assert phases[again + 2] in ("training", "saving")  # it saves every tenth of a second
    assert set(phases[:again]) <= {"starting", "training", "saving"}
    assert read_status(tmp_path, time.time()).phase == "completed"


def test_a_run_of_two_workers_has_one_state(tmp_path: Path) -> None:
    ended = run_training(2, save_dir=str(tmp_path), max_steps=3, batch_size=8)
    assert ended.error == ""
    assert says(tmp_path, "ending", 3)()
    assert read(tmp_path)["pid"] != os.getpid()
