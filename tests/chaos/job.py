"""The job of a round: a small real training, started for real, watched through its journal and /proc."""

import fcntl
import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.distributed.launcher import TORCHRUN, alone, options

MARK = "MULTIGPU_CHAOS"  # in the environment of every process of a round, with the round's own value
SECONDS = 240  # more than any one launch takes on a busy machine
HANG = 60  # seconds; a rank that hangs leaves its stacks, and counts as a restart too many
GONE = 10.0  # seconds; a loader process looks for its parent every five
SIGNALS = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


@dataclass(frozen=True)
class Job:
    """What is trained.

    Attributes:
        flags: of the front door, beside the common ones.
        steps: optimizer steps.
        every: steps between checkpoints.
        multi_gpu: of launches with several workers.
    """

    name: str
    flags: dict[str, Any] = field(default_factory=dict)
    steps: int = 300
    every: int = 10
    exact: bool = False
    multi_gpu: str = "ddp"

    def settings(self, folder: Path) -> dict[str, Any]:
        """All flags of the run, but those that say how it is launched."""
        common = {"data": "digits", "global_batch_size": 32, "batch_size": 8, "max_steps": self.steps}
        common |= {"checkpoint_every": str(self.every), "log_interval": 1, "trace_samples": True}
        common |= {"hang_timeout": HANG}
        return common | {"save_dir": str(folder)} | self.flags | ({"exact": True} if self.exact else {})

    def command(self, launcher: str, workers: int, folder: Path, restarts: int = 0) -> list[str]:
        """The command line that trains it.

        Args:
            launcher: "torchrun", or "self" for the front door alone.
            restarts: --max-restarts.
        """
        flags: dict[str, Any] = self.settings(folder) | {"quiet": True}
        if workers == 1:
            return alone(multi_gpu="none", **flags)
        if launcher == "torchrun":
            agent = [*TORCHRUN, SIGNALS, f"--nproc_per_node={workers}", f"--max-restarts={restarts}"]
            return [*agent, alone()[1], "--multi-gpu", self.multi_gpu, *options(flags)]
        return alone(multi_gpu=self.multi_gpu, nproc_per_node=workers, max_restarts=restarts, **flags)


class Attempt:
    """One launch of a job, until it is over.

    Args:
        scratch: for its output (as NAME.log) and its temporary files.
        file_limit: bytes; no file of the job may grow beyond.
    """

    def __init__(self, command: list[str], mark: str, scratch: Path, name: str, file_limit: int | None = None) -> None:
        self.mark, self.output = mark, scratch / f"{name}.log"
        temporary = scratch / "tmp"
        temporary.mkdir(parents=True, exist_ok=True)
        root = str(Path(alone()[1]).parent)
        environment = {MARK: mark, "TMPDIR": str(temporary), "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
        with open(self.output, "w") as output:
            self.process = subprocess.Popen(
                command,
                cwd=scratch,
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if file_limit is not None:  # the workers come later, and inherit it
            resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (file_limit, file_limit))

    def over(self) -> bool:
        return self.process.poll() is not None

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """Whether it happened before the attempt was over, or too long had passed."""
        until = time.monotonic() + SECONDS
        while not condition():
            if self.over() or time.monotonic() > until:
                return False
            time.sleep(0.003)
        return True

    def send(self, number: signal.Signals, rank: int | None) -> bool:
        """Send a signal to a worker, or to what was launched; whether there was somebody to get it."""
        to = self.process.pid if rank is None else worker(self.mark, rank)
        if to is None or self.over():
            return False
        with suppress(ProcessLookupError):
            os.kill(to, number)
            return True
        return False

    def exit_code(self) -> int | None:
        """What it ended with; None where it hung, and was killed."""
        try:
            return self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            end_all(self.mark)
            self.process.wait()
            return None


def processes(mark: str) -> Iterator[tuple[int, dict[str, str]]]:
    """The processes at work that carry a round's mark, with their environments; zombies have none."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # it ended while we looked, or is another user's
                words = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                environment = dict(word.split("=", 1) for word in words if "=" in word)
                if environment.get(MARK) == mark:
                    yield int(folder.name), environment


def worker(mark: str, rank: int) -> int | None:
    """The process of a rank; its loaders have its environment too, but are its children."""
    found = [process for process, environment in processes(mark) if environment.get("RANK") == str(rank)]
    return next((process for process in found if _parent(process) not in found), None)


def _parent(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def find_left_processes(mark: str) -> list[int]:
    """Processes of a round that are still there after a moment of grace."""
    until = time.monotonic() + GONE
    while (found := [process for process, _ in processes(mark)]) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def end_all(mark: str) -> None:
    """Kill whatever carries a round's mark."""
    for process, _ in processes(mark):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def progress(run: Path) -> tuple[int, int]:
    """How many attempts the journal of a run tells of, and how many steps it has of the last one."""
    try:
        journal = (run / "journal.jsonl").read_bytes()
    except FileNotFoundError:
        return 0, 0
    return journal.count(b'"event": "start"'), journal.count(b'"event": "train"', journal.rfind(b'"event": "start"'))


def lines(file: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSONL file."""
    found = []
    for text in file.read_text().splitlines() if file.exists() else []:
        with suppress(json.JSONDecodeError):  # torn by a kill
            found.append(json.loads(text))
    return found


def is_held(run: Path) -> bool:
    """Whether somebody still owns the run folder after a moment: a dying process lets go of its files last."""
    if not (run / ".lock").exists():
        return False
    with open(run / ".lock") as file:
        until = time.monotonic() + GONE
        while time.monotonic() < until:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.05)
            else:
                return False
    return True
