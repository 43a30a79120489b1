"""The journal of a run: one JSON object a line, append-only; the source of status, report and TensorBoard."""

import json
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from multigpu_cli.config.regular_files import open_regular, read_small, without_links
from multigpu_cli.errors import make_line

_MOST = 64 * 2**20  # bytes that may wait in memory
_BLOCK = 1 << 16  # bytes read at once

Warn = Callable[[str], None]


class AppendFile:
    """Appends lines; while the disk is full they wait in memory, and are written as soon as there is space.

    A line is a single `write` at the end of the file, so a killed process leaves at most the last line incomplete. An
    incomplete line is cut off: at once on a full disk, and by the next attempt after a kill. A file that was removed is
    written again with its old content, if its folder still exists. It warns when lines begin to wait, or are lost.
    """

    def __init__(self, path: Path | str, warn: Warn = warnings.warn) -> None:
        self._path, self._warn = Path(path), warn
        self._file = self._open(0)
        os.ftruncate(self._file, _whole_lines(self._file))
        self._waiting = bytearray()
        self._trouble: OSError | None = None
        self._lost = 0
        self._closed = False
        self._lock = threading.Lock()  # checkpoints are written, and journalled, by a thread of their own

    def add(self, line: str) -> None:
        """Append one line."""
        with self._lock:
            if self._closed:
                return
            if len(self._waiting) < _MOST:
                self._waiting += line.encode() + b"\n"
            else:
                self._lost += 1
            before, self._trouble = self._trouble, self._drain()
            if self._trouble and not before:
                self._warn(f"{self._path} can't be written ({self._trouble}); its lines wait in memory")

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            error = self._drain()
            if lost := self._lost + self._waiting.count(b"\n"):
                self._warn(f"{self._path}: {lost} lines are lost ({error or self._trouble})")
            os.close(self._file)

    def _drain(self) -> OSError | None:
        try:
            if os.fstat(self._file).st_nlink == 0:
                self._begin_again()
            self._write_waiting()
        except OSError as error:
            return error
        return None

    def _write_waiting(self) -> None:
        """Write the waiting lines; if the disk takes only a part of them, its whole lines stay in the file."""
        taken = 0
        try:
            while taken < len(self._waiting):
                taken += os.write(self._file, self._waiting[taken:])
        finally:
            whole = self._waiting.rfind(b"\n", 0, taken) + 1
            if whole < taken:
                os.ftruncate(self._file, os.fstat(self._file).st_size - (taken - whole))
            del self._waiting[:whole]

    def _begin_again(self) -> None:
        """Write the removed file's content to a new one; fails if another program has made a file of that name."""
        anew, old = self._open(os.O_EXCL), self._file
        self._waiting[:0] = os.pread(old, os.fstat(old).st_size, 0)
        self._file = anew
        os.close(old)

    def _open(self, flags: int) -> int:
        return without_links(str(self._path), os.O_RDWR | os.O_CREAT | os.O_APPEND | flags)


def _whole_lines(file: int) -> int:
    """Bytes of an open file up to the end of its last whole line."""
    end = os.fstat(file).st_size
    while end:
        begin = max(0, end - _BLOCK)
        if found := os.pread(file, end - begin, begin).rfind(b"\n") + 1:
            return begin + found
        end = begin
    return 0


Event = dict[str, Any]


def dump_json(value: Any, *, indent: int | None = None) -> str:
    """Text that every JSON parser reads; a non-finite number becomes "NaN", "Infinity" or "-Infinity".

    Those are strings, because JSON has no such numbers; `float()` turns them back. Finite floats keep full precision.
    What is neither plain data, a dataclass of it, nor a path, such as a tensor, is a TypeError.
    """
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


class Journal:
    """Appends events to a file, if it has one, and hands each to the listeners; it warns when none can be written."""

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


# The types of the fields that code reads are in fields.json, by kind of file, kind of line, or part of these. A field
# has one of the types in its list: the name of a check below, or of another entry. An entry has the types of an
# object's fields by name, under "*" those of all names that are not listed; or under "[]" those of a list's elements.
# Readers check a file or a line once, as a whole, so that the code behind them can rely on the types.
_NUMBER = (int, float)
_CHECKS: dict[str, Callable[[Any], bool]] = {
    "missing": lambda value: False,  # the field may be absent
    "null": lambda value: value is None,
    "text": lambda value: isinstance(value, str),
    "count": lambda value: isinstance(value, int) and 0 <= value <= 2**53,  # floats have each of these numbers
    "size": lambda value: isinstance(value, int) and 0 < value <= 2**53,
    "time": lambda value: isinstance(value, _NUMBER) and 0 <= value < 2.5e11,  # Unix seconds, to the year 9892
    "finite": lambda value: isinstance(value, _NUMBER) and abs(value) < 1e100,  # so is a product of two
    "bounded": lambda value: not isinstance(value, int) or abs(value) < 1e100,  # any integer can become a float
    "special": lambda value: isinstance(value, float) or value in ("NaN", "Infinity", "-Infinity"),
}
_LONGEST_NAME = 200  # letters; a plot's title of 50,000 takes minutes to draw
_KINDS: dict[str, dict[str, list[str]]] = json.loads(Path(__file__).with_name("fields.json").read_text())
_NEEDED = {  # the fields that an object of each kind must have
    kind: [name for name, types in fields.items() if name not in ("*", "[]") and "missing" not in types]
    for kind, fields in _KINDS.items()
}


def check_fields(content: Any, kind: str) -> None:
    """Raise ValueError, which names a field, unless `content` is an object with the fields of a kind of fields.json.

    If fields.json lacks the kind, any object will do.
    """
    if (name := _find_misfit(content, kind if kind in _KINDS else "object")) is not None:
        raise ValueError(f"{name} is missing, or of another type")


def _find_misfit(content: Any, kind: str) -> str | None:
    """Return the name of a field, or the index of an element, that is of none of its types; None if all are."""
    fields = _KINDS[kind]
    others: list[str] | None
    if isinstance(content, list) and "[]" in fields:
        content, others = dict(enumerate(content)), fields["[]"]
    elif isinstance(content, dict) and "[]" not in fields:
        others = fields.get("*")
    else:
        return "the list" if "[]" in fields else "the object"
    has_free_names = "*" in fields
    for name, value in content.items():
        # a loop of checks without further calls: a journal may have 100,000 lines
        if has_free_names and len(name) > _LONGEST_NAME:
            return f"{name[:_LONGEST_NAME]}… has too long a name: it"
        for each in fields.get(name, others) or ():
            check = _CHECKS.get(each)
            if check(value) if check else _find_misfit(value, each) is None:
                break
        else:
            if name in fields or others is not None:
                return str(name)
    for name in _NEEDED[kind]:
        if name not in content:
            return name
    return None


def read_events(path: Path | str) -> Iterator[Event]:
    """Yield the events of a journal in the order written, without incomplete and damaged lines.

    Raises OSError if the file does not exist or is not a regular file.
    """
    with open_regular(Path(path)) as lines:
        yield from (event for line in lines if (event := parse_event(line, Path(path))))


def read_json(file: Path, kind: str) -> dict[str, Any]:
    """Return the object in a small file of a run folder; {} if there is no such file, or it is damaged or a trap.

    `kind` names the types of its fields in fields.json. Warns of a file that exists and is not used.
    """
    try:
        content: dict[str, Any] = json.loads(read_small(file))
        check_fields(content, kind)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        warnings.warn(make_line(f"{file} is damaged, and not used: {error}"), stacklevel=2)
        return {}
    return content


def parse_event(line: str | bytes, journal: Path) -> Event | None:
    """Return the event in a line of a journal; None if the line is cut off, or if it is damaged, of which it warns."""
    try:
        entry: Event = json.loads(line)
        check_fields(entry, "event")
        check_fields(entry, f"{journal.name} {entry['event']}")
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        return None  # cut off by a kill, still being written, or nested too deep to be an event
    except ValueError as error:
        warnings.warn(make_line(f"{journal}: a line is damaged, and not used: {error}"), stacklevel=2)
        return None
    return entry


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
