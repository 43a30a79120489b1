"""Files that are whole or not there: written beside, flushed, renamed."""

import os
from pathlib import Path


def publish(path: Path, content: bytes) -> None:
    """Give `path` new content; a reader sees the old file or the new one, whole, even if we are killed in between."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")  # several ranks may leave the same note
    try:
        with open(draft, "wb") as file:
            if content:
                _reserve(file.fileno(), len(content))
            file.write(content)
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
