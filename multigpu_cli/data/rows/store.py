"""`RowStore`: rows of named columns that stay on the disk, whatever the format of their files; their index files."""

import fcntl
import json
import mmap
import os
import tempfile
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from multigpu_cli.checkpoint.files import publish_stream
from multigpu_cli.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a store, by the name that the files give it."""

    name: str
    kind: str  # number, of a fixed shape; bytes (an encoded image, say), text, or other, which nobody reads
    shape: tuple[int, ...] = ()  # of the numbers in one row
    dtype: str = ""  # NumPy's name of their type
    class_names: tuple[str, ...] = ()  # the names of the classes that the numbers stand for, where the files say so
    null_count: int = 0  # rows without a value, as far as the files say it; of JSON lines also NaN and Infinity
    first_null: str = ""  # the location of the first of them, if the store knows it
    description: str = ""  # the type in the words of the files, for messages

    @property
    def is_integer(self) -> bool:
        return self.kind == "number" and np.dtype(self.dtype).kind in "iub"


class RowStore(ABC):
    """Rows on the disk; reading is safe in forked processes, and a pickled store opens its files anew."""

    columns: dict[str, Column]  # in the files' order

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = [Path(file).absolute() for file in files]
        self.label = str(files[0]) if len(files) == 1 else str(Path(files[0]).parent)  # for messages

    def __reduce__(self) -> tuple[Callable[..., "RowStore"], tuple[list[Path]]]:
        return type(self), (self.files,)

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, name: str, rows: Sequence[int] | np.ndarray) -> Any:
        """A column of some rows: (n, *shape) numbers, or a list of bytes or texts; an error names a row without one."""

    def read_into(self, name: str, rows: Sequence[int] | np.ndarray, out: np.ndarray, at: Sequence[int]) -> None:
        """Write a column of numbers of some rows to the entries `at` of (n, *shape), whatever its type."""
        out[at] = self.read(name, rows)

    @abstractmethod
    def list_values(self, name: str) -> list[Any]:
        """The different values of a column of single numbers or texts; RequestError where they are too many."""


_MAGIC = b"mgpuidx1"

Build = Callable[[Callable[[Sequence[int]], object]], dict[str, Any]]
"""Passes each row of the table to its argument, in order; returns facts, plain values for JSON."""


class Index(NamedTuple):
    """A table of places, (n, width) int64 and mapped, and what was learned of the files on the way, as plain values."""

    rows: np.ndarray
    facts: dict[str, Any]


def open_index(name: str, files: Sequence[Path], width: int, build: Build, version: str) -> Index:
    """The index that an earlier process has left beside the first file, or else one that is made now.

    It holds as long as names, sizes and times of change of all files are the same, and the version of what `build`
    writes. Processes that ask for it at once wait for the first of them. Where the folder can't be written, or has no
    room, each process makes its own, which ends with it.
    """
    facts = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    mark = {"version": version, "files": facts, "width": width}
    folder = files[0].parent
    place = folder / f".multigpu-{sha256(repr([file.name for file in files]).encode()).hexdigest()[:12]}.index"

    def write(file: Any) -> None:
        learned = build(lambda row: file.write(array("q", row)))
        foot = json.dumps({**mark, "facts": learned}).encode()
        file.write(foot + len(foot).to_bytes(8, "little") + _MAGIC)
        file.flush()

    with _locked(folder) as alone:
        if found := _find(place, mark):
            return found
        with suppress(OSError):  # read-only, or full
            for left in folder.glob(f".{place.name}.*.draft") if alone else ():  # by a process that was killed
                left.unlink(missing_ok=True)
            publish_stream(place, write, 0)
            if found := _find(place, mark):
                return found
    try:
        with tempfile.TemporaryFile() as own:
            write(own)
            index = _open(own, mark)
    except OSError as error:
        raise RequestError(
            f"--data {name}: no index can be written ({error})", remedy="room for it, beside the data or in TMPDIR"
        ) from error
    assert index is not None
    return index


def _find(place: Path, mark: dict[str, Any]) -> Index | None:
    try:
        with place.open("rb") as file:
            return _open(file, mark)
    except OSError:
        return None


def _open(file: BinaryIO, mark: dict[str, Any]) -> Index | None:
    """The index, if it is whole and of these files."""
    if os.fstat(file.fileno()).st_size < 16:
        return None
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    end = len(mapped) - 16
    if mapped[-8:] != _MAGIC:
        return None
    length = int.from_bytes(mapped[end : end + 8], "little")
    try:
        foot = json.loads(mapped[max(0, end - length) : end])
        if {key: foot[key] for key in mark} != mark:
            return None
        facts = foot["facts"]
    except (ValueError, KeyError, TypeError):
        return None
    numbers = np.frombuffer(mapped, dtype=np.int64, count=(end - length) // 8)
    return Index(numbers.reshape(-1, mark["width"]), facts)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Wait until no other process holds the folder; whether that is known, for some file systems have no locks.

    It only saves work: files appear whole, whoever writes them.
    """
    number, alone = os.open(folder, os.O_RDONLY), False
    try:
        with suppress(OSError):
            fcntl.flock(number, fcntl.LOCK_EX)
            alone = True
        yield alone
    finally:
        os.close(number)
