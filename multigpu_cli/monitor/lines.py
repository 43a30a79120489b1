"""A file of lines that is only ever appended to, and outlives a full disk."""

import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

_MOST = 64 * 2**20  # bytes that may wait in memory

Warn = Callable[[str], None]


class Lines:
    """Appends lines; while the disk takes none they wait in memory, and follow as soon as it does.

    A line is a single `write` at the end of the file, so a killed process tears at most the last line, and several
    writers never mix theirs. A line that an earlier attempt left torn is ended before the next one. A file that
    somebody removes is made again, with all that was in it, if its folder is there.

    Args:
        warn: called when lines begin to wait, and in the end if some are lost.
    """

    def __init__(self, path: Path | str, warn: Warn = warnings.warn) -> None:
        self._path, self._warn = Path(path), warn
        self._file = self._opened(0)
        self._waiting = bytearray() if _ends_whole(self._file) else bytearray(b"\n")
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
            before, self._trouble = self._trouble, self._drained()
            if self._trouble and not before:
                self._warn(f"{self._path} can't be written ({self._trouble}); its lines wait in memory")

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            error = self._drained()
            if lost := self._lost + self._waiting.count(b"\n"):
                self._warn(f"{self._path}: {lost} lines are lost ({error or self._trouble})")
            os.close(self._file)

    def _drained(self) -> OSError | None:
        try:
            if os.fstat(self._file).st_nlink == 0:
                self._begin_again()
            while self._waiting:
                del self._waiting[: os.write(self._file, self._waiting)]
        except OSError as error:
            return error
        return None

    def _begin_again(self) -> None:
        """Not into a file of that name that is another's by now."""
        anew, old = self._opened(os.O_EXCL), self._file
        self._waiting[:0] = os.pread(old, os.fstat(old).st_size, 0)
        self._file = anew
        os.close(old)

    def _opened(self, flags: int) -> int:
        return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | flags, 0o666)


def _ends_whole(file: int) -> bool:
    """Whether an open file is empty or ends with a whole line; a kill may have torn the last one."""
    size = os.fstat(file).st_size
    return size == 0 or os.pread(file, 1, size - 1) == b"\n"
