"""Sends a journal to one logger: in a thread of its own, from where the last one stopped, again after an error."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from multigpu_cli.config.addresses import hide_passwords
from multigpu_cli.monitor.history import JOURNAL
from multigpu_cli.monitor.journal import Event
from multigpu_cli.monitor.loggers.base import Destination, Row
from multigpu_cli.monitor.loggers.journal_rows import JournalTail, Line, RowFilter
from multigpu_cli.monitor.loggers.own_logger import OwnLogger
from multigpu_cli.monitor.loggers.position import hold_lock, read_position, write_position
from multigpu_cli.monitor.loggers.registry import LOGGERS
from multigpu_cli.monitor.loggers.run_identity import describe_ending, identify_run
from multigpu_cli.runtime.factories import find_factory
from multigpu_cli.runtime.launch_env import list_secrets

_LOOK = 0.5  # seconds between two looks at the journal
_ROWS = 200  # sent at once
_LONGEST_PAUSE = 60.0  # seconds between two tries
_LONGEST_ERROR = 300  # characters

Note = Callable[[str], None]


class Sender(threading.Thread):
    """Follows the journal until the run has ended and everything has arrived.

    Args:
        run: the run folder.
        logger: a name of the registry, or module:Class.
        ended: set when nothing is added to the journal any more.
        note: gets a line for the user when the logger fails in another way than before.
        again: send from the beginning, whatever has arrived.
        tries: once the run has ended, give up after so many errors.
        waits: also then, for a process that sends the run, as that of a killed attempt still may.

    Attributes:
        moved: time.monotonic of the last progress.
        arrived: everything has.
    """

    def __init__(
        self,
        run: Path,
        logger: str,
        ended: threading.Event,
        note: Note,
        *,
        again: bool = False,
        tries: int = 3,
        waits: bool = True,
    ) -> None:
        super().__init__(name=f"logger {logger}", daemon=True)
        self._run, self._logger, self._ended, self._note, self._tries = run, logger, ended, note, tries
        self._again, self._waits, self._said_waiting = again, waits, False
        self._position = read_position(run, logger)
        self.moved, self.arrived = time.monotonic(), False

    def run(self) -> None:
        """Send, and try again after an error, ever less often."""
        with hold_lock(self._run, self._logger, self._gives_up) as held:
            if not held:
                return
            self._position = read_position(self._run, self._logger)  # the one before may have moved it
            self._position.sent = 0 if self._again else self._position.sent
            pause, failed = 1.0, 0
            while not self.arrived:
                try:
                    destination = _make_destination(self._logger)
                    self.moved = time.monotonic()  # importing its package may take half a minute
                    self._send_all(destination)
                except Exception as error:  # a logger or its server may raise anything: it is told, and tried again
                    self._record_error(error)
                    failed += self._ended.is_set()
                    if failed == self._tries:
                        return
                    time.sleep(1.0) if self._ended.is_set() else self._ended.wait(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE)

    def _gives_up(self) -> bool:
        """Whether another process, which sends this run, is left to it; at the end of the run it is told of once."""
        over = self._ended.is_set()
        if over and not self._said_waiting:
            self._said_waiting = True
            self._note(f"logger {self._logger}: another process is sending this run{'; waiting' * self._waits}")
        return over and not self._waits

    def _send_all(self, destination: Destination) -> None:
        while (identity := identify_run(self._run)) is None:
            if self._ended.wait(_LOOK):
                return
        tail, rows = JournalTail(self._run / JOURNAL), RowFilter()
        begin, end = destination.open(identity, self._position.sent), None
        self._confirm(begin)
        ended = False
        while not ended:
            ended = self._ended.is_set()  # before reading: what is written later is not missed
            end = self._send_new(destination, tail, rows, begin) or end
            if not ended:
                self._ended.wait(_LOOK)
        destination.finish(describe_ending(self._run, end))
        self._confirm(tail.end, final=True)
        self.arrived = True

    def _send_new(self, destination: Destination, tail: JournalTail, rows: RowFilter, begin: int) -> Event | None:
        """Send what was added to the journal; returns its last `end` or `start`, if any.

        Args:
            begin: bytes of the journal that the logger has.
        """
        batch: list[Row] = []
        last: Event | None = None

        def send(line: Line) -> None:
            if batch:
                destination.send(batch)
                batch.clear()
            if destination.confirms_each:
                self._confirm(line.end)

        line = None
        for line in tail.read():
            row = rows.select(line)
            if line.event and line.event["event"] in ("start", "end"):
                last = line.event
            if row and line.end > begin:
                batch.append(row)
            if len(batch) == _ROWS:
                send(line)
        if line and line.end > begin:
            send(line)
        return last

    def _confirm(self, sent: int, *, final: bool = False) -> None:
        """The journal has arrived up to here."""
        self.moved = time.monotonic()
        if (sent, "") != (self._position.sent, self._position.error) or final:
            self._position.sent, self._position.error = sent, ""
            write_position(self._run, self._position)

    def _record_error(self, error: Exception) -> None:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        text = hide_passwords(text, list_secrets())[:_LONGEST_ERROR]
        if text != self._position.error:
            self._position.error = text
            self._note(f"logger {self._logger}: {text}")
        write_position(self._run, self._position)


def _make_destination(logger: str) -> Destination:
    if logger in LOGGERS:
        destination: Destination = find_factory(logger, LOGGERS, flag="--logger")()
        return destination
    return OwnLogger(logger)
