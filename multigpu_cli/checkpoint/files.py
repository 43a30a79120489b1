"""Files that are whole or not there: written beside, flushed, renamed."""

import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

PIECE = 32 * 2**20  # bytes that are written or read at once: a disk that takes them in time is no hang

Moved = Callable[[], None]
"""Told of each piece: progress."""


def ignore_progress() -> None:
    """The default where progress is not followed."""


def publish(path: Path, content: bytes, moved: Moved = ignore_progress) -> None:
    """Give `path` new content; a reader sees the old file or the new one, whole, even if we are killed in between.

    Args:
        moved: called for each piece that has reached the disk.
    """
    publish_stream(path, lambda file: file.write(content), len(content), moved)


def publish_stream(
    path: Path, write: Callable[["ProgressFile"], object], size: int, moved: Moved = ignore_progress
) -> None:
    """The same for content that is written piece by piece.

    Args:
        size: bytes that there will be at least.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")  # several ranks may leave the same note
    try:
        with open(draft, "wb") as file:
            if size:
                _reserve(file.fileno(), size)
            write(ProgressFile(file, moved))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)
    moved()


class ProgressFile:
    """A file whose bytes go to the disk as they come, so that it is seen to move."""

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
    """SHA-256 of a file, read piece by piece."""
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
    """A full disk is noticed before the first byte is written."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)


def flush_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
