"""The tensors that the ranks of a sharded run divide by rows: one .safetensors file for each rank, read by slices.

In state.pt such a tensor is an outline: one of its shape and dtype on the meta device, which takes no memory.
"""

import io
import json
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils._pytree import tree_leaves

from multigpu_cli.checkpoint.files import DraftFile, Moved, ignore_progress, publish_stream
from multigpu_cli.errors import RequestError
from multigpu_cli.runtime.module_state import map_tensors, name_tensor

_FORMATS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


State = dict[str, Any]
"""Tensors and plain values, nested in dicts, lists and tuples: what a checkpoint holds, or a part of it."""


class Rows(NamedTuple):
    """Rows of a tensor that are next to each other."""

    tensor: Tensor  # (rows, …), in host memory
    begin: int  # the number of the first in the whole tensor


def write_piece(file: Path, rows: Mapping[str, Rows], moved: Moved = ignore_progress) -> dict[str, Any]:
    """Write one rank's rows; returns the size and SHA-256 of the file, as a manifest lists them.

    Tensor by tensor, unlike the library, which makes a second copy of everything in memory first. OSError: it failed.
    """
    held = {name: each for name, each in rows.items() if each.tensor.numel()}
    order = sorted(held, key=lambda name: (-held[name].tensor.itemsize, name))  # so that each begins at a multiple
    header = _describe(held, order)

    def write(draft: DraftFile) -> None:
        draft.write(header)
        for name in order:
            draft.write(_as_bytes(held[name].tensor).flatten().numpy().data)

    return publish_stream(file, write, len(header) + sum(held[name].tensor.nbytes for name in order), moved)


def _describe(rows: Mapping[str, Rows], order: Iterable[str]) -> bytes:
    """The beginning of a .safetensors file: the header's length, and format, shape and place of each tensor."""
    begins = {name: rows[name].begin for name in order}
    header: dict[str, Any] = {"__metadata__": {"begins": json.dumps(begins)}}
    end = 0
    for name in order:
        tensor = rows[name].tensor
        shape = list(tensor.shape if tensor.dtype in _FORMATS else _as_bytes(tensor).shape)
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _FORMATS.get(tensor.dtype, "U8"), "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _as_bytes(tensor: Tensor) -> Tensor:
    """(…, bytes of an element) uint8."""
    return tensor.detach().contiguous().unsqueeze(-1).view(torch.uint8)


class Pieces:
    """Reads tensors, or rows of them, from these files of an intact checkpoint; RequestError: a file has no rows."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self._folder = folder
        self._parts: defaultdict[str, list[tuple[int, int, Any]]] = defaultdict(list)
        for name in names:
            with _refuse(folder / name):
                file = safe_open(folder / name, framework="pt")
                begins = json.loads(file.metadata()["begins"])
                for tensor in file.keys():  # noqa: SIM118 - the file is no dict
                    begin, rows = int(begins[tensor]), file.get_slice(tensor)
                    self._parts[tensor].append((begin, begin + rows.get_shape()[0], rows))

    def read(self, name: str, outline: Tensor, begin: int = 0, end: int | None = None) -> Tensor:
        """Rows `begin` to `end` of a tensor, or all of it; `outline` has the whole's shape and dtype.

        RequestError: rows are missing or there twice, or they are of another tensor.
        """
        end = outline.shape[0] if end is None else end
        self._check_complete(name, outline)
        empty = torch.empty((0, *outline.shape[1:]), dtype=outline.dtype)
        return torch.cat([empty, *self._read_parts(name, outline, begin, end)])

    def _read_parts(self, name: str, outline: Tensor, begin: int, end: int) -> Iterator[Tensor]:
        for first, last, rows in self._parts[name]:
            if (low := max(begin, first)) < (high := min(end, last)):
                with _refuse(self._folder):
                    found: Tensor = rows[low - first : high - first]
                    if outline.dtype not in _FORMATS:
                        found = found.view(outline.dtype).squeeze(-1)
                if found.dtype != outline.dtype or found.shape[1:] != outline.shape[1:]:
                    raise _refusal(self._folder, f"{name} is of another shape or format than in state.pt")
                yield found

    def _check_complete(self, name: str, outline: Tensor) -> None:
        """Whether each row is there once."""
        parts = self._parts[name]
        parts.sort(key=lambda part: part[:2])
        borders = [0, *(border for first, last, _ in parts for border in (first, last)), outline.shape[0]]
        if outline.numel() and any(borders[place] != borders[place + 1] for place in range(0, len(borders), 2)):
            held = ", ".join(f"{first} to {last}" for first, last, _ in parts) or "none"
            raise _refusal(self._folder, f"of the {outline.shape[0]} rows of {name} its files have {held}")


def fill_outlines(state: dict[str, Any], read: Callable[[str, Tensor], Tensor]) -> dict[str, Any]:
    """Return the state with each outline, a tensor on the meta device, replaced by `read(name, outline)`."""
    return dict(map_tensors(state, lambda path, value: read(name_tensor(path), value) if value.is_meta else value))


@contextmanager
def _refuse(place: Path) -> Iterator[None]:
    """Turn the library's errors inside the context into a refusal of the checkpoint."""
    try:
        yield
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise _refusal(place, f"no rows of a checkpoint can be read from it ({type(error).__name__})") from error


def _refusal(place: Path, problem: str) -> RequestError:
    return RequestError(f"{place}: {problem}", remedy="an older checkpoint of that run, or its best.pt")


def serialize(state: Any) -> bytes:
    """The bytes of `torch.save`; written to memory, since torch.save puts the name of a file into its archive."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def write_state(file: Path, state: dict[str, Any], moved: Moved) -> dict[str, Any]:
    """Write the bytes of `serialize`, without a second copy of the state in memory; returns size and SHA-256."""

    def write(draft: DraftFile) -> None:
        torch.save(state, draft)  # type: ignore[arg-type]  # it calls write and flush only

    return publish_stream(file, write, count_tensor_bytes(state), moved)


def count_tensor_bytes(state: Any) -> int:
    """The size of the tensors in a state; tied ones count once, outlines not at all."""
    storages = (tensor.untyped_storage() for tensor in iterate_tensors(state) if not tensor.is_meta)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def iterate_tensors(state: Any) -> Iterator[Tensor]:
    """All tensors of nested dicts, lists and tuples."""
    return (leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor))


def deserialize(content: bytes | Path, origin: str) -> Any:
    """Load the state in a file's bytes; only tensors and plain values are accepted, so no code runs.

    Of a file itself, tensors are mapped into memory as far as torch can do that. RequestError: it is no such file.
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
        remedy = "use a file saved by torch.save that contains only tensors and plain values, or .safetensors"
        return RequestError(f"{origin} can't be loaded safely as weights ({type(error).__name__})", remedy=remedy)
    problem = f"{origin} can't be loaded safely as weights{f' ({asked[1]})' if asked else ''}: it is {kind}"
    remedy = "save its weights alone, in the program that made it: torch.save(model.state_dict(), 'weights.pt')"
    return RequestError(problem, remedy=remedy)


def _read_start(content: bytes | Path) -> bytes:
    """The first byte of a file, or of its content."""
    if isinstance(content, bytes):
        return content[:1]
    with content.open("rb") as file:
        return file.read(1)
