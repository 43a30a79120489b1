"""A process beside rank 0 that follows the run folder: how rank 0 starts, hears and ends it, and its own side of that.

It is in a session of its own: no terminal, no torchrun and no signal to the run ends it. A byte on its stdin means that
the run has ended; the loss of its parent, that rank 0 died. What it writes to rank 0 is read without waiting. No torch.
"""

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO

_ROOT = Path(__file__).resolve().parents[2]
_START = (
    "import sys; from importlib import import_module; sys.path.insert(0, sys.argv.pop(1)); "
    "import_module(sys.argv.pop(1)).main(sys.argv[1:])"
)
_NICE = 10  # less of a busy machine's time than a training gets


class Companion:
    """The process, seen from rank 0; nothing here waits for it.

    Args:
        module: its `main(arguments)` calls `accompany` first. The working directory stays that of the run, and no
            module is searched there.
        errors: where its stderr goes, and what libraries print.

    Raises:
        OSError: the machine can't start one.
    """

    def __init__(self, module: str, arguments: Sequence[str], errors: int | IO[bytes] = subprocess.DEVNULL) -> None:
        command = [sys.executable, "-P", "-c", _START, str(_ROOT), module, *arguments]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, start_new_session=True)
        assert self.process.stdin
        assert self.process.stdout
        self._pipe, self._notes, self._unread = self.process.stdin, self.process.stdout, b""
        os.set_blocking(self._notes.fileno(), False)

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def read_notes(self) -> list[str]:
        """The lines that it has written since the last call."""
        if not self._notes.closed:
            with suppress(BlockingIOError):
                self._unread += os.read(self._notes.fileno(), 65536)
        *lines, self._unread = self._unread.split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def tell_end(self) -> None:
        """The run has ended: the process sends the rest, and ends."""
        with suppress(BrokenPipeError):  # it is gone already
            self._pipe.write(b"\n")  # closing alone is not seen while a loader process, a fork, holds the pipe too
            self._pipe.close()

    def leave(self, *, kill: bool) -> None:
        """Hear it no more; if it is not killed, it goes on alone, for as long as it gives itself."""
        self._notes.close()
        if self.running and kill:
            with suppress(ProcessLookupError):  # it has just ended
                os.killpg(self.process.pid, signal.SIGKILL)
        threading.Thread(target=self.process.wait, name="companion's end", daemon=True).start()


def accompany() -> tuple[threading.Event, Callable[[str], None]]:
    """Become a companion: no signal ends this process, and it yields to the training.

    Returns:
        an event that is set when the run has ended or rank 0 is gone, and what writes a line to rank 0.
    """
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(each, _ignore)  # a job's manager may signal all processes; the run's end decides
    os.nice(_NICE)
    pipe, notes, null = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)  # a library may print
    os.set_blocking(notes, False)
    ended = threading.Event()

    def note(text: str) -> None:
        with suppress(OSError):  # a reader that is gone, or does not read
            os.write(notes, (" ".join(text.splitlines()) + "\n").encode())

    threading.Thread(target=_wait_for_end, args=(pipe, os.getppid(), ended), daemon=True).start()
    return ended, note


def _wait_for_end(pipe: int, parent: int, ended: threading.Event) -> None:
    """Wait until something is in the pipe, its other end is closed, or this process has lost its parent."""
    while os.getppid() == parent:
        readable, _, _ = select.select([pipe], [], [], 1.0)
        if readable:
            break
    ended.set()


def _ignore(number: int, frame: FrameType | None) -> None:
    """Nothing: a handler, for one that is ignored would be ignored in a library's own processes too."""
