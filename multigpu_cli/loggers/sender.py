"""Sends a journal to loggers: a process beside rank 0, without torch, with a thread for each logger.

A thread begins where the last one stopped, and tries again after an error. The process ends by itself: when the run has
ended, or rank 0 is gone, it has some seconds to send the rest.
"""

import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from multigpu_cli.checkpoint.files import publish, take_lock
from multigpu_cli.config.code_names import hide_passwords
from multigpu_cli.config.regular_files import open_regular, read_small, without_links
from multigpu_cli.config.resume_rules import PRIVATE
from multigpu_cli.config.yaml_text import UnreadableError, compose, parse_typed
from multigpu_cli.distributed.processes import Companion, serve
from multigpu_cli.errors import RequestError, pluralize
from multigpu_cli.faults.explain import hide_secrets
from multigpu_cli.loggers.base import Destination, Ending, Row, RunIdentity, find_logger
from multigpu_cli.monitor.history import JOURNAL, JournalTail, Line
from multigpu_cli.monitor.journal import Event, Warn, parse_event, read_json
from multigpu_cli.monitor.tensorboard import flatten, list_scalars

_COMPARED = ("loss", "mean_loss", "lr")
_ROUNDING = 1e-3  # by which a step that was trained again, perhaps on more workers, may differ; BatchNorm amplifies


class RowFilter:
    """Makes rows of `train` and `eval` lines, and leaves out steps that were trained again with the same result."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, int], dict[str, float]] = {}

    def select(self, line: Line) -> Row | None:
        """The row of a line, None if it has none; every line of the journal has to pass, also those sent before."""
        event = line.event
        if event is None or event["event"] not in ("train", "eval") or not isinstance(event.get("step"), int):
            return None
        key = (str(event.get("split", "")), event["step"])
        compared = {name: event[name] for name in _COMPARED if isinstance(event.get(name), int | float)}
        before, self._last[key] = self._last.get(key), compared
        if before is not None and before.keys() == compared.keys():
            pairs = [(value, before[name]) for name, value in compared.items()]
            if all(math.isclose(*pair, rel_tol=_ROUNDING, abs_tol=1e-9) for pair in pairs):
                return None
        return Row(line.number, event["step"], event["time"], dict(list_scalars(event)))


_LOOK = 0.5  # seconds between two looks at the journal
_LINES = 200  # of the journal, whose rows are sent at once
_LONGEST_PAUSE = 60.0  # seconds between two tries
_LONGEST_ERROR = 300  # characters

Note = Callable[[str], None]


class Sender(threading.Thread):
    """Follows the journal until the run has ended and everything has arrived.

    Args:
        logger: a name of the registry, or module:Class.
        ended: set when nothing is added to the journal any more.
        note: gets a line for the user when the logger fails in another way than before.
        again: send from the beginning, whatever has arrived.
        replay: give up after an error, or if another process sends the run, e.g. one left over from a killed attempt.
    """

    def __init__(
        self, run: Path, logger: str, ended: threading.Event, note: Note, *, again: bool, replay: bool
    ) -> None:
        super().__init__(name=f"logger {logger}", daemon=True)
        self._run, self._logger, self._ended, self._note, self._tries = run, logger, ended, note, 1 if replay else 3
        self._again, self._waits, self._said_waiting = again, not replay, False
        self._position = read_position(run, logger)
        self.moved, self.arrived = time.monotonic(), False  # time of the last progress; whether everything has

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
                    destination = find_logger(self._logger)()
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
        """Send what was added to the journal beyond `begin`, which has arrived; returns its last `end` or `start`."""
        new = tail.read()
        last: Event | None = None
        while lines := list(islice(new, _LINES)):
            selected = [(line, rows.select(line)) for line in lines]
            if batch := [row for line, row in selected if row and line.end > begin]:
                destination.send(batch)
            if destination.confirms_each and lines[-1].end > begin:
                self._confirm(lines[-1].end)
            events = [line.event for line in lines if line.event and line.event["event"] in ("start", "end")]
            last = events[-1] if events else last
        return last

    def _confirm(self, sent: int, *, final: bool = False) -> None:
        """The journal has arrived up to here."""
        self.moved = time.monotonic()
        if (sent, "") != (self._position.sent, self._position.error) or final:
            self._position.sent, self._position.error = sent, ""
            write_position(self._run, self._position)

    def _record_error(self, error: Exception) -> None:
        text = hide_secrets(" ".join(f"{type(error).__name__}: {error}".split()))[:_LONGEST_ERROR]
        if text != self._position.error:
            self._position.error = text
            self._note(f"logger {self._logger}: {text}")
        write_position(self._run, self._position)


def identify_run(run: Path) -> RunIdentity | None:
    """The identity of the run in a folder; None before the first line of its journal.

    The id is a hash of that line, which names host and time: it stays with the journal, wherever the folder goes.
    RequestError: the line is not an event, or config.yaml is not a mapping of settings.
    """
    try:
        with open_regular(run / JOURNAL) as file:
            first = file.readline()
    except FileNotFoundError:
        return None
    if not first.endswith(b"\n"):
        return None
    if (event := parse_event(first, run / JOURNAL)) is None:
        raise RequestError(f"{run / JOURNAL}:1: is not an event of a run", remedy="remove the line")
    folder, config = run.resolve(), _read_settings(run / "config.yaml")
    return RunIdentity(
        id=sha256(first).hexdigest()[:16],
        name=folder.name,
        folder=str(folder),
        project=str(config.get("recipe") or config.get("data.name") or "multigpu"),
        config=config,
        began=float(event.get("time", 0)),
    )


def _read_settings(file: Path) -> dict[str, Any]:
    """Return the settings of a run's config.yaml by key, without private ones and passwords; {} if it is missing.

    RequestError: the file is not plain YAML: an alias, for instance, may stand for billions of values.
    """
    try:
        root = compose(read_small(file).decode())
        content = {} if root is None else parse_typed(root)
    except FileNotFoundError:
        return {}
    except UnreadableError as error:
        raise RequestError(f"{file}:{error.line}: {error.problem}", remedy="repair or remove the file") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{file}: is not UTF-8 text", remedy="repair or remove the file") from error
    if not isinstance(content, dict):
        raise RequestError(f"{file}: is not a mapping of settings", remedy="repair or remove the file")
    public = flatten({key: value for key, value in content.items() if key not in PRIVATE})
    return {key: hide_passwords(value) if isinstance(value, str) else value for key, value in public}


def describe_ending(run: Path, end: Event | None) -> Ending:
    """How the last attempt ended, by its `end` event if there is one, and which files it left."""
    checkpoints = sorted(run.glob("checkpoints/step_*/manifest.json"))
    manifest = read_json(checkpoints[-1], "manifest.json") if checkpoints else {}
    place = f"checkpoints/{checkpoints[-1].parent.name}" if checkpoints else ""
    files = {f"{place}/{name}": str(listed["sha256"]) for name, listed in manifest.get("files", {}).items()}
    if best := manifest.get("best"):
        files["best.pt"] = str(best["sha256"])
    end = end or {}
    return Ending(str(end.get("status", "killed")), str(end.get("fingerprint") or ""), place, files)


FOLDER = "loggers"  # in the run folder


@dataclass
class Position:
    """How far the journal has been sent to one logger."""

    logger: str  # its name, as --logger gives it
    sent: int = 0  # bytes of the journal that have arrived
    error: str = ""  # why the last try failed, without passwords; "" if it did not


def read_position(run: Path, logger: str) -> Position:
    """The position in a run folder; that of the beginning where there is none, or none that can be read."""
    found = read_json(_file(run, logger), "position")
    return Position(logger, found["sent"], found["error"]) if found else Position(logger)


def write_position(run: Path, position: Position) -> None:
    publish(_file(run, position.logger), json.dumps(asdict(position)).encode() + b"\n")


def explain_unsent(run: Path, position: Position, lines: int) -> str:
    """What was not sent, and what sends it."""
    reason = f" ({position.error})" if position.error else ""
    missing = f"{pluralize(lines, 'line')} of {run / JOURNAL} not sent{reason}"
    return f"logger {position.logger}: {missing}; multigpu log {run} --to {position.logger} sends them"


@contextmanager
def hold_lock(run: Path, logger: str, is_over: Callable[[], bool] = lambda: False) -> Iterator[bool]:
    """Hold the lock of those who send a run to this logger; wait for it until `is_over`. Yields whether it is held."""
    (run / FOLDER).mkdir(exist_ok=True)
    with open(_file(run, logger).with_suffix(".lock"), "a", opener=without_links) as file:
        yield take_lock(file, is_over)


def _file(run: Path, logger: str) -> Path:
    return run / FOLDER / (re.sub(r"[^\w.-]+", "-", logger) + ".json")


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
        more = "" if replay else "; training continues"
        self._companion = Companion(__name__, [text], lambda line: warn(line + more))

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


def list_unsent(run: Path, loggers: Sequence[str] | None = None) -> list[tuple[Position, int]]:
    """The loggers, None for all that the folder knows, that lack lines of a run's journal, each with their number."""
    known = (str(read_json(file, "position").get("logger", "")) for file in sorted((run / FOLDER).glob("*.json")))
    positions = [read_position(run, name) for name in (filter(None, known) if loggers is None else loggers)]
    unsent = ((each, sum(1 for _ in JournalTail(run / JOURNAL, each.sent).read())) for each in positions)
    return [(each, lines) for each, lines in unsent if lines]


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
        time.sleep(0.1)


def main(arguments: Sequence[str]) -> NoReturn:
    """Follow the journal that the request, JSON in the first argument, names."""
    follow(json.loads(arguments[0]), *serve())
    os._exit(0)  # past a library's exit handlers, which may wait for a server
