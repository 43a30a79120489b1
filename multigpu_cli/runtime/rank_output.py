"""Redirects the output of ranks other than 0 to files, so that only rank 0 writes to the terminal."""

import ctypes
import io
import os
import platform
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Self, TextIO

_HEAD = "--- rank "  # each attempt's first line
_TAIL = 8192  # bytes


class RankOutput:
    """Turns this process's standard output and error to a file, for Python and for what C libraries write alike.

    On leaving the context both are back, so that an error is told where the user looks.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._before: tuple[tuple[int, int], TextIO, TextIO] | None = None

    def start(self, logs: Path, attempt: int) -> None:
        """From now on, at the end of this rank's file; where it can't be opened, output stays where it was."""
        if self._before is not None:
            return
        _flush()
        with suppress(OSError):  # the folder of a run may lie on another machine
            file = os.open(log_path(logs, self._rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            kept = os.dup(1), os.dup(2)
            here = f"{platform.node()}, process {os.getpid()}"
            head = f"{_HEAD}{self._rank}, attempt {attempt + 1}, {time.strftime('%Y-%m-%d %H:%M:%S')}, {here}\n"
            os.write(file, head.encode())
            self._before = kept, sys.stdout, sys.stderr
            for number in (1, 2):
                os.dup2(file, number)
            os.close(file)
            sys.stdout, sys.stderr = _stream(1, kept[0]), _stream(2, kept[1])

    def stop(self) -> None:
        """Back to the terminal, or wherever output went before."""
        if self._before is None:
            return
        _flush()
        kept, sys.stdout, sys.stderr = self._before
        self._before = None
        _flush()  # who still holds the earlier streams may have written into them
        for number, before in enumerate(kept, 1):
            os.dup2(before, number)
            os.close(before)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def log_path(logs: Path, rank: int) -> Path:
    """The file of a rank."""
    return logs / f"rank_{rank}.log"


def read_last_lines(logs: Path, rank: int, lines: int = 4) -> list[str]:
    """The last lines that a rank printed in its last attempt; none where they are not known here."""
    try:
        with open(log_path(logs, rank), "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            text = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    heads = [at for at, line in enumerate(text) if line.startswith(_HEAD)]
    return text[max(heads[-1] + 1 if heads else 0, len(text) - lines) :]


def quote_last_lines(logs: Path | None, rank: int) -> str:
    """The same for a message: "", or a first line that names the file, and theirs."""
    said = read_last_lines(logs, rank) if logs else []
    return (
        "".join(f"\n  {line}" for line in [f"it said last ({log_path(logs, rank)}):", *said]) if logs and said else ""
    )


def find_ranks_with_output(logs: Path, size: int) -> list[int]:
    """The ranks whose last attempt has printed something into its file on this machine."""
    return [rank for rank in range(size) if read_last_lines(logs, rank)]


class _Raw(io.RawIOBase):
    """A descriptor; what it does not take, on a full disk say, goes to the terminal instead."""

    def __init__(self, number: int, otherwise: int) -> None:
        self._number, self._otherwise = number, otherwise

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def write(self, data: object) -> int:
        try:
            return os.write(self._number, data)  # type: ignore[arg-type]
        except OSError:
            return os.write(self._otherwise, data)  # type: ignore[arg-type]


def _stream(number: int, otherwise: int) -> TextIO:
    buffer = io.BufferedWriter(_Raw(number, otherwise))
    return io.TextIOWrapper(buffer, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _flush() -> None:
    """Python's streams, and those of C."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or its reader has gone
            stream.flush()
    ctypes.CDLL(None).fflush(None)
