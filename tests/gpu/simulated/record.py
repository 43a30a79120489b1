"""What the simulated device was asked to do, and which line of ours asked for it."""

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

_OURS = ("/multigpu_cli/", "/benchmarks/")


class Event(NamedTuple):
    """Something that the host waits for, or that is worth looking at.

    Attributes:
        kind: sync (the host waits for the device), copy (an asynchronous one between page-locked memory and a device),
            pageable (one to the device that torch calls asynchronous, of memory that is not page-locked),
            record_stream, out of memory.
        what: the operator or function.
        device: its number.
        stream: the current one of that device, in the thread that asked; 0 is the default stream.
        bytes: of what is copied or asked for.
        place: file:line function of the innermost caller in multigpu_cli or benchmarks; where there is none, as in a
            hook that torch calls, of the innermost of all.
        thread: the caller's name.
    """

    kind: str
    what: str
    device: int
    stream: int
    bytes: int
    place: str
    thread: str


class Record:
    """Collects events while somebody looks.

    Args:
        file: where every event is appended as a JSON line besides, from all processes; "" for nowhere.
    """

    def __init__(self, file: str = "") -> None:
        self._watchers: list[list[Event]] = []
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666) if file else None

    def heard(self, kind: str, what: str, device: int, stream: int, size: int) -> None:
        """What the device calls, in any thread."""
        if not self._watchers and self._file is None:
            return
        event = Event(kind, what, device, stream, size, _place(), threading.current_thread().name)
        for events in self._watchers:
            events.append(event)
        if self._file is not None:
            line: dict[str, Any] = event._asdict() | {"rank": os.environ.get("RANK", "0"), "pid": os.getpid()}
            os.write(self._file, f"{json.dumps(line)}\n".encode())

    @contextmanager
    def watching(self) -> Iterator[list[Event]]:
        """The events from here to the end of the context, of all threads."""
        events: list[Event] = []
        self._watchers.append(events)
        try:
            yield events
        finally:
            self._watchers.remove(events)


def _place() -> str:
    frame = innermost = sys._getframe(1).f_back
    if innermost is None:
        return "a thread of torch's own"
    while frame is not None:
        name = frame.f_code.co_filename
        for folder in _OURS:
            if folder in name and "/tests/" not in name:
                return _line(f"{folder[1:]}{name.rpartition(folder)[2]}", frame)
        frame = frame.f_back
    return _line(innermost.f_code.co_filename, innermost)


def _line(file: str, frame: FrameType) -> str:
    return f"{file}:{frame.f_lineno} {frame.f_code.co_name}"
