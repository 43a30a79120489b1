"""Reads a growing journal line by line, and makes of it the rows that loggers get."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from multigpu_cli.monitor.journal import Event, parse_event
from multigpu_cli.monitor.loggers.base import Row
from multigpu_cli.monitor.tensorboard import list_scalars

_COMPARED = ("loss", "mean_loss", "lr")
_ROUNDING = 1e-3  # by which a step that was trained again, perhaps on more workers, may differ; BatchNorm amplifies


class Line(NamedTuple):
    """One line of a journal.

    Attributes:
        number: counted from 1.
        end: bytes of the journal up to its end.
        event: None if the line is no event.
    """

    number: int
    end: int
    event: Event | None


class JournalTail:
    """Reads the whole lines of a journal; what is added later comes with the next call.

    Attributes:
        end: bytes that were read.
    """

    def __init__(self, path: Path) -> None:
        self._path, self.end, self._lines = path, 0, 0

    def read(self) -> Iterator[Line]:
        """The lines since the last call; none if there is no journal yet."""
        try:
            file = open(self._path, "rb")  # noqa: SIM115 - closed below
        except FileNotFoundError:
            return
        with file:
            file.seek(self.end)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # still being written
                self.end += len(line)
                self._lines += 1
                yield Line(self._lines, self.end, parse_event(line))


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
        if before is not None and _is_same(before, compared):
            return None
        return Row(line.number, event["step"], event["time"], dict(list_scalars(event)))


def _is_same(one: dict[str, float], other: dict[str, float]) -> bool:
    return one.keys() == other.keys() and all(
        math.isclose(value, other[name], rel_tol=_ROUNDING, abs_tol=1e-9) for name, value in one.items()
    )
