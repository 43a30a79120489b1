"""Files that are whole or not there: written beside, flushed, renamed."""

import io
import os
from pathlib import Path
from typing import Any

import torch

from multigpu_cli.errors import RequestError


def publish(path: Path, content: bytes) -> None:
    """Give `path` new content; a reader sees the old file or the new one, whole, even if we are killed in between."""
    draft = path.with_name(f".{path.name}.draft")
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


def packed(state: Any) -> bytes:
    """A state as the bytes of `torch.save`; through memory, so that no file name gets into them."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def unpacked(content: bytes, origin: str) -> Any:
    """The state in a file's bytes; nothing but tensors and plain values is accepted, so no code runs.

    Raises:
        RequestError: not such a file.
    """
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises anything from EOFError to UnpicklingError for a foreign file
        raise RequestError(
            f"{origin} is no file of weights that can be loaded safely ({type(error).__name__})",
            remedy="a file saved by torch.save that holds only tensors and plain values",
        ) from error
