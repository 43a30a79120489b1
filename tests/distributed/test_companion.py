"""A companion outlives the run's signals, hears of its end, and survives rank 0; real processes, of this very file."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from multigpu_cli.distributed.processes import Companion, serve
from tests.support.wait_until import wait_until

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def main(arguments: list[str]) -> None:
    """The companion: it writes what happens to it into the file that it is given."""
    ended, note = serve()
    print("a library prints")
    note("two\nlines")
    note(f"nice {os.nice(0)}")
    assert ended.wait(30)
    time.sleep(float(arguments[1]))
    Path(arguments[0]).write_text("the end")


def start(heard: list[str], lingers: float = 0) -> Companion:
    """One that is at work: both of its notes were heard."""
    companion = Companion(__name__, ["told", str(lingers)], heard.append)
    wait_until(lambda: companion.relay() or len(heard) == 2, "2 notes")
    return companion


def test_what_it_writes_comes_line_by_line_and_the_end_of_the_run_is_heard() -> None:
    heard: list[str] = []
    companion = start(heard)
    assert heard == ["two lines", f"nice {os.nice(0) + 10}"], "nothing of what a library prints"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        os.kill(companion.process.pid, number)
    time.sleep(0.2)
    assert companion.running
    assert not Path("told").exists()
    companion.end(lambda: True)
    assert companion.process.returncode == 0
    assert Path("told").read_text() == "the end"


@pytest.mark.parametrize("kill", [True, False])
def test_one_that_goes_on_after_the_end_is_killed_or_left_alone(kill: bool) -> None:
    companion = start([], lingers=1)
    companion.end(lambda: False, kill=kill)
    companion.process.wait(30)
    assert Path("told").exists() != kill


def test_the_death_of_rank_0_is_heard_though_a_fork_of_it_holds_the_pipe() -> None:
    code = (
        f"import os, time; from {__name__} import start; companion = start([])\n"
        "if fork := os.fork():\n    open('fork', 'w').write(str(fork))\n    os.kill(os.getpid(), 9)\ntime.sleep(60)"
    )
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    died = subprocess.run([sys.executable, "-c", code], env=environ, timeout=60, check=False, stdout=subprocess.DEVNULL)
    assert died.returncode == -signal.SIGKILL
    try:
        wait_until(Path("told").exists, "it has heard of the end")
    finally:
        os.kill(int(Path("fork").read_text()), signal.SIGKILL)
