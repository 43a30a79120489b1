"""A state as bytes and back: only tensors and plain values, so that no code runs from a file."""

import io
from typing import Any

import torch

from multigpu_cli.errors import RequestError


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
