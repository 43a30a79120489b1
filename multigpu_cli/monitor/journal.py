"""The journal of a run: one JSON object a line, append-only; the source of status, report and TensorBoard."""

import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Self

from multigpu_cli.monitor.append_file import AppendFile, Warn

Event = dict[str, Any]


def dump_json(value: Any, *, indent: int | None = None) -> str:
    """Text that every JSON parser reads; a non-finite number becomes "NaN", "Infinity" or "-Infinity".

    Those are strings, because JSON has no such numbers; `float()` turns them back. Finite floats keep full precision.

    Raises:
        TypeError: something that is neither plain data, a dataclass of it, nor a path; such as a tensor.
    """
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


class Journal:
    """Appends events to a file and hands each of them to the listeners.

    Args:
        path: the file; None (ranks above 0) writes nothing but still calls the listeners.
        listeners: called with each event, in order, after its line is written.
        warn: called when no lines can be written.
    """

    def __init__(
        self, path: Path | str | None, listeners: Sequence[Callable[[Event], None]] = (), warn: Warn = warnings.warn
    ) -> None:
        self._lines = None if path is None else AppendFile(path, warn)
        self._listeners = tuple(listeners)

    def write(self, event: str, **fields: Any) -> Event:
        """Append one event with the current time, and return it."""
        entry = {"event": event, "time": time.time()} | fields
        line = dump_json(entry)
        if self._lines:
            self._lines.add(line)
        for listener in self._listeners:
            listener(entry)
        return entry

    def close(self) -> None:
        if self._lines:
            self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_events(path: Path | str) -> Iterator[Event]:
    """The events of a journal in the order written, without incomplete lines.

    Raises:
        FileNotFoundError: there is no journal.
    """
    with open(path, encoding="utf-8", errors="replace") as lines:
        yield from (event for line in lines if (event := parse_event(line)))


def parse_event(line: str | bytes) -> Event | None:
    """The event in a line of a journal; None if the line is cut off or is no event."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None  # cut off by a kill, or still being written
    match entry:
        case {"event": str(), "time": int() | float()}:
            return dict(entry)
    return None


def _finite(value: Any) -> Any:
    match value:
        case str() | int() | None:
            return value
        case float():
            return value if math.isfinite(value) else {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
        case Mapping():
            return {key: _finite(entry) for key, entry in value.items()}
        case list() | tuple():
            return [_finite(entry) for entry in value]
        case Path():
            return str(value)
    return _finite(vars(value)) if is_dataclass(value) else value
