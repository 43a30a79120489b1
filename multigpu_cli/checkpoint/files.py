"""Files that are whole or not there: written beside, flushed, renamed."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def publish(path: Path, content: bytes) -> None:
    """Give `path` new content; a reader sees the old file or the new one, whole, even if we are killed in between."""
    publish_by(path, lambda file: file.write(content), len(content))


def publish_by(path: Path, write: Callable[[BinaryIO], object], size: int) -> None:
    """The same for content that is written piece by piece.

    Args:
        size: bytes that there will be at least.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")  # several ranks may leave the same note
    try:
        with open(draft, "wb") as file:
            if size:
                _reserve(file.fileno(), size)
            write(file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def sweep(folder: Path) -> None:
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
