"""The journal of a run: one JSON object a line, append-only; what status, report and TensorBoard derive from."""

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

Event = dict[str, Any]


def valid_json(value: Any, *, indent: int | None = None) -> str:
    """Text that every JSON parser reads; a non-finite number becomes "NaN", "Infinity" or "-Infinity".

    Those are strings, because JSON has no such numbers; `float()` turns them back. Finite floats keep full precision.

    Raises:
        TypeError: something that is neither plain data nor a path, such as a tensor.
    """
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


class Journal:
    """Appends events to a file and hands each of them to the listeners.

    A line is a single `write` at the end of the file, so a killed process tears at most the last line, and several
    writers never mix theirs. A line that an earlier attempt left torn is ended before the next one.

    Args:
        path: the file; None writes nothing (ranks that do not speak) but still hands events on.
        listeners: called with each event, in order, after its line is written.
    """

    def __init__(self, path: Path | str | None, listeners: Sequence[Callable[[Event], None]] = ()) -> None:
        self._file = None if path is None else os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._at_line_start = self._file is None or ends_whole(self._file)
        self._listeners = tuple(listeners)
        self._lock = threading.Lock()  # checkpoints are written, and journalled, by a thread of their own

    def write(self, event: str, **fields: Any) -> Event:
        """Append one event with the time of now, and return it."""
        entry = {"event": event, "time": time.time()} | fields
        self._append(valid_json(entry).encode() + b"\n")
        for listener in self._listeners:
            listener(entry)
        return entry

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, line: bytes) -> None:
        with self._lock:
            if self._file is None:
                return
            left = line if self._at_line_start else b"\n" + line
            self._at_line_start = False  # stays so if the disk fills up in the middle
            while left:
                left = left[os.write(self._file, left) :]
            self._at_line_start = True


def read(path: Path | str) -> Iterator[Event]:
    """The events of a journal in the order written, passing over torn lines.

    Raises:
        FileNotFoundError: there is no journal.
    """
    with open(path, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue  # torn by a kill, or still being written
            if isinstance(entry, dict) and "event" in entry:
                yield entry


def ends_whole(file: int) -> bool:
    """Whether an open file is empty or ends with a whole line; a kill may have torn the last one."""
    size = os.fstat(file).st_size
    return size == 0 or os.pread(file, 1, size - 1) == b"\n"


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
        case Mapping():
            return {key: _finite(entry) for key, entry in value.items()}
        case list() | tuple():
            return [_finite(entry) for entry in value]
        case Path():
            return str(value)
    return value
