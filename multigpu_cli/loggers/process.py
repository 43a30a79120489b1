"""The process beside rank 0 that follows the journal and sends it; how it starts, reports trouble and ends.

It imports the loggers, and no torch. It ends by itself: when the run has ended, or rank 0 is gone, it has some seconds
to send the rest.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from multigpu_cli.distributed.processes import Companion, serve
from multigpu_cli.loggers.sender import FOLDER, Position, Sender, count_unsent_lines, explain_unsent, read_position
from multigpu_cli.monitor.journal import Event, Warn

_STOPPED = 5.0  # seconds at most after a stop: torchrun kills 30 s after its signal, of which a checkpoint takes some
_MARGIN = 1.0  # seconds for the process to end by itself when its time is up


class LoggerProcess:
    """The process that sends a journal, which may not exist yet, to the loggers; a listener of the journal on rank 0.

    Nothing here waits for it before `close`, which calls `alive` again and again. `wait` are seconds that it may still
    send after the run has completed; `again` sends from the beginning. A `replay` is of a run that is over: it sends
    what is in the journal, and gives up after an error or `wait` without progress.
    """

    def __init__(
        self,
        run: Path,
        loggers: Sequence[str],
        wait: float,
        warn: Warn,
        *,
        again: bool = False,
        replay: bool = False,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        self._run, self._loggers, self._wait, self._warn, self._alive = run, loggers, wait, warn, alive
        self._replay, self._status, self._lost = replay, "", False
        request: dict[str, Any] = {"run": str(run.resolve()), "loggers": list(loggers), "wait": wait}
        (run / FOLDER).mkdir(exist_ok=True)
        text = json.dumps(request | {"again": again, "replay": replay})
        # its stderr goes nowhere: libraries may name a server with its password
        self._companion = Companion("multigpu_cli.loggers.process", [text], self._hear)

    def __call__(self, event: Event) -> None:
        """Note how the run ends, and show what the process has to say: one read that does not wait."""
        if event["event"] == "end":
            self._status = str(event["status"])
        self._companion.relay()
        if not self._lost and not self._companion.running:
            self._lost = True
            self._warn("the process of the loggers has ended; training continues, and the journal has everything")

    def close(self) -> None:
        """End the process: give it time after a completed run, less after a stop, none after a failure."""
        patience = {"completed": self._wait, "stopped": min(self._wait, _STOPPED)}.get(self._status, 0.0)
        until = time.monotonic() + patience + _MARGIN if patience or self._replay else 0.0

        def waits() -> bool:
            if within := self._replay or time.monotonic() < until:
                self._alive()
            return within

        self._companion.end(waits, kill=bool(patience or self._replay))  # after a failure it goes on alone
        if patience:
            for position, lines in list_unsent(self._run, self._loggers):
                self._warn(explain_unsent(self._run, position, lines))

    def _hear(self, line: str) -> None:
        self._warn(line + ("" if self._replay else "; training continues"))


def list_unsent(run: Path, loggers: Sequence[str]) -> list[tuple[Position, int]]:
    """The loggers that have not got all of a run's journal, each with the number of lines that it lacks."""
    positions = [read_position(run, name) for name in loggers]
    return [(each, lines) for each in positions if (lines := count_unsent_lines(run, each))]


_LOOK = 0.1  # seconds


def follow(request: dict[str, Any], ended: threading.Event, note: Callable[[str], None]) -> None:
    """Send the journal to all loggers, each in a thread, until all has arrived or time is up, as `LoggerProcess` asks.

    What `note` takes goes to the user; the position file has the errors too.
    """
    replay = bool(request["replay"])
    if replay:
        ended.set()
    run, again = Path(request["run"]), bool(request["again"])
    senders = [Sender(run, name, ended, note, again=again, replay=replay) for name in request["loggers"]]
    for sender in senders:
        sender.start()
    ended.wait()
    began = time.monotonic()
    while any(sender.is_alive() for sender in senders):
        since = max([began, *(sender.moved for sender in senders)]) if replay else began
        if time.monotonic() - since > request["wait"]:
            return
        time.sleep(_LOOK)


def main(arguments: Sequence[str]) -> NoReturn:
    """Follow the journal that the request, JSON in the first argument, names."""
    follow(json.loads(arguments[0]), *serve())
    os._exit(0)  # past a library's exit handlers, which may wait for a server
