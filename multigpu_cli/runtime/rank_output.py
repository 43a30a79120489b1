"""Redirects the output of ranks other than 0 to files, so that only rank 0 writes to the terminal."""

import ctypes
import io
import os
import platform
import sys
import time
from contextlib import suppress
from logging import getLogger
from pathlib import Path
from typing import Self, TextIO

from multigpu_cli.runtime.launch_env import LaunchEnv

_HEAD = "--- rank "  # each attempt's first line
_TAIL = 8192  # bytes


class RankOutput:
    """Redirects this process's stdout and stderr to a file, for Python and C libraries.

    On leaving the context both are restored, so that an error is printed to the terminal.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._before: tuple[tuple[int, int], TextIO, TextIO] | None = None

    def start(self, logs: Path, attempt: int) -> None:
        """Append output to this rank's file from now on; if the file can't be opened, output is not redirected."""
        if self._before is not None:
            return
        _flush()
        with suppress(OSError):  # the folder of a run may lie on another machine
            file = os.open(log_path(logs, self._rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
            originals = os.dup(1), os.dup(2)
            here = f"{platform.node()}, process {os.getpid()}"
            head = f"{_HEAD}{self._rank}, attempt {attempt + 1}, {time.strftime('%Y-%m-%d %H:%M:%S')}, {here}\n"
            os.write(file, head.encode())
            self._before = originals, sys.stdout, sys.stderr
            for number in (1, 2):
                os.dup2(file, number)
            os.close(file)
            sys.stdout, sys.stderr = _stream(1, originals[0]), _stream(2, originals[1])

    def stop(self) -> None:
        """Restore the original stdout and stderr."""
        if self._before is None:
            return
        _flush()
        originals, sys.stdout, sys.stderr = self._before
        self._before = None
        _flush()  # other code may have kept and used the original streams
        for number, before in enumerate(originals, 1):
            os.dup2(before, number)
            os.close(before)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def log_path(logs: Path, rank: int) -> Path:
    """The output file of a rank."""
    return logs / f"rank_{rank}.log"


def read_last_lines(logs: Path, rank: int, lines: int = 4) -> list[str]:
    """The last lines that a rank printed in its last attempt; empty if its file is not on this machine."""
    try:
        with open(log_path(logs, rank), "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            text = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    heads = [at for at, line in enumerate(text) if line.startswith(_HEAD)]
    return text[max(heads[-1] + 1 if heads else 0, len(text) - lines) :]


def quote_last_lines(logs: Path | None, rank: int) -> str:
    """The last lines of a rank for a message, after a line that names the file; "" if there are none."""
    lines = read_last_lines(logs, rank) if logs else []
    if not logs or not lines:
        return ""
    return "".join(f"\n  {line}" for line in [f"its last output ({log_path(logs, rank)}):", *lines])


def find_ranks_with_output(logs: Path, size: int) -> list[int]:
    """The ranks whose last attempt has written output into its file on this machine."""
    return [rank for rank in range(size) if read_last_lines(logs, rank)]


def say_before_run(text: str) -> None:
    """On stderr, by the first process of a machine: until the data is there, there is no run that could tell."""
    launch_env = LaunchEnv.current()
    if launch_env is None or launch_env.local_rank == 0:
        getLogger(__name__).warning("%s", text)


class _Raw(io.RawIOBase):
    """A file descriptor; if a write fails, for instance on a full disk, the bytes go to the terminal instead."""

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
    """Flush the streams of Python and of C."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or a pipe without a reader
            stream.flush()
    ctypes.CDLL(None).fflush(None)
