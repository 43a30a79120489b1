"""logs/state.json: what rank 0 is doing now, and logs/request: what somebody asks of it; without torch."""

import json
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING

from multigpu_cli.capabilities import REQUESTS
from multigpu_cli.config.regular_files import open_new, read_small

if TYPE_CHECKING:
    from multigpu_cli.faults.rank_exits import OwnProgress

STATE, REQUEST = "logs/state.json", "logs/request"
MOST_STEPS = 1000  # that a request may ask for
_INTERVAL = 1.0  # seconds between two looks
_COUNTS = {str(steps) for steps in range(1, MOST_STEPS + 1)}
_ID = re.compile("[0-9a-f]{32}")
_PHASES = {"starting", "evaluating", "saving"}  # of the watchdog's; all others are parts of training


class RunState:
    """Writes the file where phase or step have changed, at most once a second, in a thread of its own.

    It reads what the watchdog is told in any case, so that no step calls anything here, and a disk that does not answer
    keeps this thread alone waiting. The file has `phase` (starting, training, evaluating, saving or ending), `step`
    (optimizer steps done), `time` (Unix seconds at which both were seen first), `host`, `pid` and `started`, see
    `read_process`, and the same two of the launcher if it has `restarts` left, else zeros.

    The thread also looks for a request (a name of REQUESTS, a number of steps and an id), a file that stays until it is
    finished. On ranks above 0, where `run` is None, there is no thread. While `check_owner` raises, nothing is written.
    """

    def __init__(self, run: Path | None, own: "OwnProgress", check_owner: Callable[[], None], restarts: int) -> None:
        self.ending = False  # the last step is done, and what ends the run is at work
        self.asked = self._taken = False  # a request waits; is at work
        self._own, self._check_owner = own, check_owner
        self._closed, self._written = Event(), ("", -1)
        self._thread: Thread | None = None
        pid, launcher = os.getpid(), os.getppid() if restarts > 0 else 0
        self._process = {"host": os.uname().nodename, "pid": pid, "started": read_process(pid)[1]}
        self._process |= {"launcher": launcher, "launcher_started": read_process(launcher)[1] or 0}
        if run is not None:
            self._file, self._request = run / STATE, run / REQUEST
            self.finish_request()  # of an earlier attempt
            self._thread = Thread(target=self._follow, name="state", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Write the last state, and end the thread."""
        self._closed.set()
        if self._thread:
            self._thread.join(timeout=2 * _INTERVAL)  # no longer, where the disk does not answer
            self.finish_request()

    def take_request(self) -> list[str]:
        """On rank 0, the words of the request that waits; [] if it was taken before, or is not in the form of ours."""
        before, self._taken, self.asked = self._taken, True, False
        if before:  # the thread has seen it once more
            return []
        with suppress(OSError):
            words = read_small(self._request).decode(errors="replace").split()
            if len(words) == 3 and words[0] in REQUESTS and words[1] in _COUNTS and _ID.fullmatch(words[2]):
                return words
        self.finish_request()
        return []

    def finish_request(self) -> None:
        """On rank 0: remove the request, which is done; the next one may come."""
        with suppress(OSError):  # a disk that refuses this refuses checkpoints too, which are missed
            self._request.unlink(missing_ok=True)
        self._taken = False

    def _follow(self) -> None:
        closed = False
        while True:
            with suppress(OSError):  # no request; or a full disk, of which the journal warns: the next look tries again
                self._write_if_changed()
                if self._request.stat().st_size and not self._taken:  # an empty one is being written
                    self.asked = True
            if closed:
                return
            closed = self._closed.wait(_INTERVAL)

    def _write_if_changed(self) -> None:
        step, phase = self._own.steps, self._own.phase
        phase = "ending" if self.ending else phase if phase in _PHASES else "training"
        if (phase, step) != self._written:
            self._check_owner()
            self._file.parent.mkdir(exist_ok=True)
            draft = self._file.with_name(f".{self._file.name}.draft")
            try:
                draft.unlink(missing_ok=True)  # of an attempt that was killed
                with open_new(draft) as file:
                    file.write(json.dumps({"phase": phase, "step": step, "time": time.time()} | self._process).encode())
                draft.replace(self._file)
            finally:
                draft.unlink(missing_ok=True)
            self._written = phase, step


def read_process(pid: int | str) -> tuple[str, int | None]:
    """Return a process's state, e.g. T if it is suspended, and its start in clock ticks since boot, by proc(5).

    "" and None: this machine has no such process any more, or no /proc.
    """
    try:
        fields = Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()
    except (OSError, TypeError, ValueError):
        return "", None
    return ("", None) if fields[0] in "ZX" else (fields[0], int(fields[19]))
