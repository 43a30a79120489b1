"""How far the journal has been sent to a logger: a small file in the run folder, and the lock of the one who sends."""

import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from multigpu_cli.errors import pluralize
from multigpu_cli.monitor.history import JOURNAL, read_json

FOLDER = "loggers"  # in the run folder


@dataclass
class Position:
    """How far the journal has been sent to one logger.

    Attributes:
        logger: its name, as --logger gives it.
        sent: bytes of the journal that have arrived.
        error: why the last try failed, without passwords; "" if it did not.
    """

    logger: str
    sent: int = 0
    error: str = ""


def read_position(run: Path, logger: str) -> Position:
    """The position in a run folder; that of the beginning where there is none, or none that can be read."""
    try:
        content = json.loads(_file(run, logger).read_text())
        return Position(logger, int(content["sent"]), str(content["error"]))
    except (OSError, ValueError, KeyError, TypeError):
        return Position(logger)


def write_position(run: Path, position: Position) -> None:
    """Replace the file; a reader sees the old content or the new one."""
    file = _file(run, position.logger)
    draft = file.with_name(f".{file.name}.{os.getpid()}.draft")
    draft.write_text(json.dumps(asdict(position)) + "\n")
    draft.replace(file)


def count_unsent_lines(run: Path, position: Position) -> int:
    """The lines of the journal that have not arrived."""
    try:
        with open(run / JOURNAL, "rb") as file:
            file.seek(position.sent)
            return sum(1 for line in file if line.endswith(b"\n"))
    except OSError:
        return 0


def list_positions(run: Path) -> list[Position]:
    """The positions of all loggers that a run folder knows."""
    names = [str(read_json(file).get("logger", "")) for file in sorted((run / FOLDER).glob("*.json"))]
    return [read_position(run, name) for name in names if name]


def explain_unsent(run: Path, position: Position, lines: int) -> str:
    """What was not sent, and what sends it."""
    reason = f" ({position.error})" if position.error else ""
    missing = f"{pluralize(lines, 'line')} of {run / JOURNAL} not sent{reason}"
    return f"logger {position.logger}: {missing}; multigpu log {run} --to {position.logger} sends them"


@contextmanager
def hold_lock(run: Path, logger: str, is_over: Callable[[], bool] = lambda: False) -> Iterator[bool]:
    """Hold the lock of those who send a run to this logger; wait for it until `is_over`. Yields whether it is held."""
    (run / FOLDER).mkdir(exist_ok=True)
    with open(_file(run, logger).with_suffix(".lock"), "a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if is_over():
                    yield False
                    return
                time.sleep(0.1)
            else:
                yield True
                return


def _file(run: Path, logger: str) -> Path:
    return run / FOLDER / (re.sub(r"[^\w.-]+", "-", logger) + ".json")
