"""`RowStore`: rows of named columns that stay on the disk, whatever the format of their files; their index files."""

import fcntl
import hashlib
import json
import mmap
import os
import tempfile
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from multigpu_cli.checkpoint.files import DraftFile, publish_stream, sign_cache
from multigpu_cli.config.regular_files import is_trusted, open_regular, refuse_special_file
from multigpu_cli.distributed.processes import say_before_run
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
        for file in self.files:
            refuse_special_file(file)
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
        """The different values of a column of single numbers or texts; RequestError if they are too many."""


_MAGIC = b"mgpuidx2"

Build = Callable[[Callable[[Sequence[int]], object]], dict[str, Any]]
"""Passes each row of the table to its argument, in order; returns facts, plain values for JSON."""


class Index(NamedTuple):
    """A table of places, (n, width) int64 and mapped, and what was learned of the files on the way, as plain values."""

    rows: np.ndarray
    facts: dict[str, Any]


def open_index(name: str, files: Sequence[Path], width: int, build: Build, version: str) -> Index:
    """Return the index that an earlier process left beside the first file, or else one that is made now.

    It holds as long as names, sizes and times of change of all files are the same, and the version of what `build`
    writes. It has a checksum, and is used only if nobody but this user, root and the owner of the data could write it,
    because whoever writes an index chooses the labels. An index that is refused is named, and made again.

    Processes that ask for it at once wait for the first of them. If the folder can't be written, or has no room, each
    process makes an index of its own, which ends with it. Raises RequestError if that has no room either.
    """
    facts = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    mark = {"version": version, "files": facts, "width": width}
    folder, owner = files[0].parent, files[0].stat().st_uid
    names = repr([file.name for file in files]).encode()
    path = folder / f".multigpu-{hashlib.sha256(names).hexdigest()[:12]}.index"

    def write(file: BinaryIO | DraftFile) -> None:
        digest = hashlib.sha256()

        def add(row: Sequence[int]) -> None:
            content = array("q", row).tobytes()
            digest.update(content)
            file.write(content)

        foot = {**mark, "facts": build(add)}
        text = json.dumps({**foot, "sha256": sign_cache(digest, foot)}).encode()
        file.write(text + len(text).to_bytes(8, "little") + _MAGIC)
        file.flush()

    with _locked(folder) as alone:
        index, problem = _find(path, mark, owner)
        if index:
            return index
        if problem:
            say_before_run(f"the index {path} is not used, since {problem}: it is made again")
        with suppress(OSError):  # read-only, or full
            for left in folder.glob(f".{path.name}.*.draft") if alone else ():  # by a process that was killed
                left.unlink(missing_ok=True)
            publish_stream(path, write, 0, mode=0o644)  # a mode that lets the group write would not be trusted
            index, _ = _find(path, mark, owner)
            if index:
                return index
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


def _find(path: Path, mark: dict[str, Any], owner: int) -> tuple[Index | None, str]:
    """Return the index in a file, or None and why it must not be used; "" if it is absent or of earlier data."""
    try:
        with open_regular(path) as file:
            if not is_trusted(file, owner):
                return None, "others can write it"
            return _open(file, mark), ""
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, str(error.strerror or error)


_DAMAGED = "it is damaged"  # a file that claims to be an index of these files is not what was written


def _open(file: BinaryIO, mark: dict[str, Any]) -> Index | None:
    """Return the index in a file; None if it is of other files or versions.

    Raises OSError if the file is damaged: too short, unreadable, or with a wrong checksum.
    """
    if os.fstat(file.fileno()).st_size < 16:
        raise OSError(_DAMAGED)
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    end = len(mapped) - 16
    length = int.from_bytes(mapped[end : end + 8], "little")
    size = end - length
    try:
        foot = json.loads(mapped[max(0, size) : end])
        known, facts, checksum = {key: foot[key] for key in mark}, foot["facts"], foot.get("sha256")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise OSError(_DAMAGED) from error
    if known != mark:
        return None
    if mapped[-8:] != _MAGIC or size % (8 * mark["width"]):
        raise OSError(_DAMAGED)
    with memoryview(mapped) as content:
        digest = hashlib.sha256(content[:size])
    if sign_cache(digest, {**known, "facts": facts}) != checksum:
        raise OSError(_DAMAGED)
    return Index(np.frombuffer(mapped, dtype=np.int64, count=size // 8).reshape(-1, mark["width"]), facts)


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
