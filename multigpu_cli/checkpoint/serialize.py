"""Serializes a state, and reads back only tensors and plain values, so that no code runs from a file."""

import io
import re
import warnings
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import is_zipfile

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from multigpu_cli.checkpoint.files import ProgressFile
from multigpu_cli.errors import RequestError


def serialize(state: Any) -> bytes:
    """The bytes of `torch.save`; written to memory, since torch.save puts the name of a file into its archive."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def serialize_to_file(state: Any, file: BinaryIO | ProgressFile) -> tuple[int, str]:
    """Write the bytes of `serialize` to a file, without a second copy of the state in memory; returns size and SHA-256.

    Raises:
        OSError: a write failed; torch itself would only report an inconsistent archive.
    """
    summed = HashingFile(file)
    try:
        torch.save(state, summed)  # type: ignore[arg-type]  # it calls write and flush only
    except RuntimeError as error:
        if summed.error:
            raise summed.error from error
        raise
    return summed.size, summed.sum.hexdigest()


def count_tensor_bytes(state: Any) -> int:
    """The size of the tensors in a state; tied ones count once, outlines not at all."""
    storages = (tensor.untyped_storage() for tensor in iterate_tensors(state) if not tensor.is_meta)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def iterate_tensors(state: Any) -> Iterator[Tensor]:
    """All tensors of nested dicts, lists and tuples."""
    return (leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor))


class HashingFile:
    """A file that counts and hashes what is written, and keeps the error of a failed write."""

    def __init__(self, file: BinaryIO | ProgressFile) -> None:
        self._file, self.size, self.sum = file, 0, sha256()
        self.error: OSError | None = None

    def write(self, piece: bytes | memoryview) -> int:
        try:
            self._file.write(piece)
        except OSError as error:
            self.error = error
            raise
        self.sum.update(piece)
        self.size += len(piece)
        return len(piece)

    def flush(self) -> None:
        self._file.flush()


def deserialize(content: bytes | Path, origin: str) -> Any:
    """Load the state in a file's bytes; only tensors and plain values are accepted, so no code runs.

    Args:
        content: the bytes, or the file itself, whose tensors are then mapped into memory as far as torch can do that.

    Raises:
        RequestError: the bytes are not such a file.
    """
    mapped = isinstance(content, Path) and is_zipfile(content)  # torch's files from before 2020 are none
    try:
        source = content if isinstance(content, Path) else io.BytesIO(content)
        with warnings.catch_warnings():  # of other kinds of files, which the error names
            warnings.simplefilter("ignore")
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # torch raises anything from EOFError to UnpicklingError for a foreign file
        raise _explain_refusal(content, origin, error) from error


def _explain_refusal(content: bytes | Path, origin: str, error: Exception) -> RequestError:
    """What a file is that can't be loaded as tensors and plain values, and what to save instead."""
    asked = re.search(r"GLOBAL ([\w.]+)", str(error))  # what a pickle would need beside tensors
    if "TorchScript" in str(error):
        kind = "a TorchScript archive"
    elif asked or _read_start(content) == b"\x80":  # as pickles of protocol 2 and later begin
        kind = "a pickle of Python objects, such as a whole model"
    else:
        return RequestError(
            f"{origin} can't be loaded safely as weights ({type(error).__name__})",
            remedy="use a file saved by torch.save that contains only tensors and plain values, or .safetensors",
        )
    return RequestError(
        f"{origin} can't be loaded safely as weights{f' ({asked[1]})' if asked else ''}: it is {kind}",
        remedy="save its weights alone, in the program that made it: torch.save(model.state_dict(), 'weights.pt')",
    )


def _read_start(content: bytes | Path) -> bytes:
    """The first byte."""
    if isinstance(content, bytes):
        return content[:1]
    with content.open("rb") as file:
        return file.read(1)
