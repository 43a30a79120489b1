"""Atomic file writes: a temporary file is written, flushed and renamed."""

import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

PIECE = 32 * 2**20  # bytes per read or write; each one counts as progress for the hang watchdog

Moved = Callable[[], None]
"""Called after each chunk that is read or written, so that the hang watchdog sees progress."""


def ignore_progress() -> None:
    """The default where no watchdog runs."""


def publish(path: Path, content: bytes, moved: Moved = ignore_progress) -> None:
    """Write `path` atomically: a reader sees the complete old or new content, even if this process is killed.

    Args:
        moved: called after each chunk is written to disk.
    """
    publish_stream(path, lambda file: file.write(content), len(content), moved)


def publish_stream(
    path: Path, write: Callable[["ProgressFile"], object], size: int, moved: Moved = ignore_progress
) -> None:
    """Like `publish`, for content that is written in chunks.

    Args:
        size: lower bound of the file's size in bytes; that much space is reserved first.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")  # several ranks may write the same file
    try:
        with open(draft, "wb") as file:
            if size:
                _reserve(file.fileno(), size)
            write(ProgressFile(file, moved))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:  # also of what gives the content
        draft.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)
    moved()


class ProgressFile:
    """A file that is flushed to disk after each chunk, which counts as progress."""

    def __init__(self, file: BinaryIO, moved: Moved) -> None:
        self._file, self._moved, self._since = file, moved, 0

    def write(self, content: bytes | memoryview) -> int:
        view = memoryview(content).cast("B")
        for begin in range(0, len(view), PIECE):
            self._since += self._file.write(view[begin : begin + PIECE])
            if self._since >= PIECE:
                self._file.flush()
                os.fsync(self._file.fileno())
                self._since = 0
                self._moved()
        return len(view)

    def flush(self) -> None:
        self._file.flush()


def compute_sha256(file: Path, moved: Moved = ignore_progress) -> str:
    """SHA-256 of a file, read in chunks."""
    digest = sha256()
    with open(file, "rb") as content:
        while piece := content.read(PIECE):
            digest.update(piece)
            moved()
    return digest.hexdigest()


def remove_drafts(folder: Path) -> None:
    """Remove the drafts of processes that were killed."""
    for draft in folder.glob(".*.draft"):
        draft.unlink()


def _reserve(descriptor: int, size: int) -> None:
    """Reserve the space, so that a full disk fails before the first byte is written."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)


def flush_folder(folder: Path) -> None:
    """Make renames in a folder survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
