"""Starts the process that mirrors a run folder, passes its troubles on, and waits for it at the end of the run."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from multigpu_cli.checkpoint import mirror_process
from multigpu_cli.checkpoint.mirror_state import read_state
from multigpu_cli.config.mirror_url import make_absolute

if TYPE_CHECKING:
    from multigpu_cli.run.run import Run

_PROJECT = Path(mirror_process.__file__).resolve().parents[2]
_STOP_WAIT = 10.0  # seconds that a run which was told to stop waits; the process itself goes on after that


class MirrorProcess:
    """The process that follows a run folder, seen from rank 0.

    It is in a session of its own, so that it can send the last checkpoint of a run that was killed.

    Args:
        run: the run folder, whose lock is held.
        keep: how many of the newest checkpoints stay in the mirror.
    """

    def __init__(self, run: Path, url: str, keep: int) -> None:
        self._run, self.url = run.absolute(), url
        (self._run / "logs").mkdir(exist_ok=True)
        command = [sys.executable, "-m", mirror_process.__name__, str(self._run), make_absolute(url), str(keep)]
        with open(self._run / "logs" / "mirror.log", "ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=_PROJECT, start_new_session=True
            )
        self._reported = ""

    def read_new_fault(self) -> str:
        """Why the last upload failed, unless it was said before; "" if none did."""
        error = read_state(self._run).error
        if self._process.poll() not in (None, 0) and not error:
            error = f"its process ended with exit code {self._process.returncode}: {self._run / 'logs' / 'mirror.log'}"
        new, self._reported = error if error != self._reported else "", error
        return new

    def finish(self, patience: float, moved: Callable[[], None]) -> str:
        """Let the process send what is missing, and end; returns what is missing, with the way out, or "".

        Args:
            patience: seconds until this returns although the process, which gives up by itself, is still sending.
            moved: called while it is at work.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already
            self._process.stdin.write(b"\n")  # closing alone says nothing: forked loader workers hold this end too
            self._process.stdin.close()
        until = time.monotonic() + patience
        while self._process.poll() is None:
            if time.monotonic() > until:
                return f"{self.url} is not complete yet: process {self._process.pid} goes on sending"
            moved()
            time.sleep(0.1)
        if self._process.returncode == 0:
            return ""
        why = read_state(self._run).error or f"see {self._run / 'logs' / 'mirror.log'}"
        return f"{self.url} is not complete ({why}); multigpu mirror {self._run} --to {self.url} sends the rest"


@contextmanager
def open_mirror(run: "Run") -> Iterator[None]:
    """Mirror the run folder for as long as the context lasts; a completed run waits at its end until all is sent."""
    config = run.config.checkpoint
    mirror = run.checkpointer.mirror = MirrorProcess(run.folder, str(config.mirror), config.keep)
    patience = 0.0
    try:
        yield
        patience = inf if run.finished else _STOP_WAIT
    finally:
        if missing := mirror.finish(patience, run.observer.watchdog.mark_progress):
            run.log.console.warn(missing)
