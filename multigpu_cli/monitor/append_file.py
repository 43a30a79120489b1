"""An append-only file of lines that survives a full disk."""

import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

_MOST = 64 * 2**20  # bytes that may wait in memory
_BLOCK = 1 << 16  # bytes read at once

Warn = Callable[[str], None]


class AppendFile:
    """Appends lines; while the disk is full they wait in memory, and are written as soon as there is space.

    A line is a single `write` at the end of the file, so a killed process leaves at most the last line incomplete. An
    incomplete line is cut off: at once on a full disk, and by the next attempt after a kill. A file that was removed is
    written again with its old content, if its folder still exists.

    Args:
        warn: called when lines begin to wait, and at the end if some are lost.
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
        return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | flags, 0o666)


def _whole_lines(file: int) -> int:
    """Bytes of an open file up to the end of its last whole line."""
    end = os.fstat(file).st_size
    while end:
        begin = max(0, end - _BLOCK)
        if found := os.pread(file, end - begin, begin).rfind(b"\n") + 1:
            return begin + found
        end = begin
    return 0
