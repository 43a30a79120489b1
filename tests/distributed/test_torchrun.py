"""The agent that schedulers start: real agents where signals matter, stand-ins for how torch's ends."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from multigpu_cli.distributed import torchrun
from multigpu_cli.distributed.launch_env import write_error
from multigpu_cli.errors import FAILED, STOPPED
from tests.support.fork import write_output_to

ROOT = Path(__file__).resolve().parents[2]
WORKER = """
import os, signal, time
from pathlib import Path
from multigpu_cli.distributed.launch_env import write_error
from multigpu_cli.distributed.processes import die_with_parent

def save(number, frame):
    Path("told-" + os.environ["RANK"]).touch()
    while not Path("save").exists():
        time.sleep(0.02)
    write_error(os.environ, 75, "stopped")
    os._exit(75)

die_with_parent()
signal.signal(signal.SIGTERM, save)
Path("begun-" + os.environ["RANK"]).touch()
while True:
    signal.pause()
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    (tmp_path / "worker.py").write_text(WORKER)
    started: list[subprocess.Popen[str]] = []

    def begin(*words: str) -> "subprocess.Popen[str]":
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "multigpu_cli.distributed.torchrun", *words, "worker.py"],
                cwd=tmp_path,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        return started[-1]

    yield begin
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with process:
            process.wait()


def wait_for(process: "subprocess.Popen[str]", happened: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not happened():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < until
        time.sleep(0.02)


def answers(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, 1).close()
    except OSError:
        return False
    return True


def test_signals_that_follow_the_first_leave_the_workers_time_to_save(start: Start, tmp_path: Path) -> None:
    """SLURM sends SIGTERM two or three times where it preempts; torchrun's patience ends with the third."""
    running = start("--standalone", "--nproc-per-node=2")
    wait_for(running, lambda: all((tmp_path / f"begun-{rank}").exists() for rank in range(2)))
    running.send_signal(signal.SIGTERM)
    wait_for(running, lambda: all((tmp_path / f"told-{rank}").exists() for rank in range(2)))
    for _ in range(3):
        running.send_signal(signal.SIGTERM)
        time.sleep(0.2)  # two at once are one
    (tmp_path / "save").touch()
    assert running.wait(60) == STOPPED
    assert running.communicate()[1] == ""


def test_whoever_waits_for_another_node_ends_at_once(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        store = ("localhost", taken.getsockname()[1])
    words = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={store[0]}:{store[1]}"]

    def begin() -> None:
        with open(tmp_path / "said", "w") as file:
            write_output_to(file, file)
            sys.exit(torchrun.run_agent([*words, "worker.py"]))

    running = get_context("fork").Process(target=begin)
    running.start()
    try:
        until = time.monotonic() + 60
        while not answers(store):
            assert running.is_alive()
            assert time.monotonic() < until
            time.sleep(0.02)
        running.terminate()
        running.join(60)
    finally:
        running.kill()
    assert running.exitcode == 128 + signal.SIGTERM
    assert "Traceback" not in (tmp_path / "said").read_text()


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[BaseException, int | None], int]]:
    """What comes of torch's agent ending like this, its only worker with this exit code in its error file."""

    def end(error: BaseException, code: int | None) -> int:
        def run(asked: Any) -> None:
            file = Path(asked.log_dir, "run", "attempt_0", "0", "error.json")
            file.parent.mkdir(parents=True)
            if code is not None:
                write_error({"TORCHELASTIC_ERROR_FILE": str(file)}, code, "said")
            raise error

        monkeypatch.setattr(torchrun, "run", run)
        return torchrun.run_agent(["--nproc-per-node=1", "worker.py"])

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    yield end
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_worker_that_failed_while_it_stopped_has_no_checkpoint(ended: Callable[..., int]) -> None:
    told = SignalException("told", signal.SIGUSR1)
    assert [ended(told, code) for code in (STOPPED, FAILED, None)] == [STOPPED, 138, 138]


def test_a_node_whose_workers_heard_of_the_stop_from_others_has_stopped_as_well(ended: Callable[..., int]) -> None:
    failure = ProcessFailure(0, 1, STOPPED, "")
    assert ended(ChildFailedError("worker.py", {0: failure}), STOPPED) == STOPPED


def test_a_failure_is_torchs_to_tell(ended: Callable[..., int]) -> None:
    failure = ProcessFailure(0, 1, FAILED, "")
    with pytest.raises(ChildFailedError):
        ended(ChildFailedError("worker.py", {0: failure}), FAILED)
