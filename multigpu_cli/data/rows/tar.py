"""Rows of WebDataset shards: the members of a .tar that share a name up to its first dot are one sample.

The shards stay as they are; an index of the members' places is made once, and a member is then read by its place.
"""

import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from io import BufferedReader, BytesIO, FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from multigpu_cli.config.paths import IMAGES, is_hidden
from multigpu_cli.data.files import OpenFiles, parse_json
from multigpu_cli.data.rows.store import Column, RowStore, open_index
from multigpu_cli.errors import RequestError

_INTEGER = re.compile(rb"[+-]?[0-9]+")  # int() takes 1_1 for 11, and reads the digits of other alphabets
_NUMBERS = ("cls", "id", "index")  # a whole number as text: it is kept in the index itself
_TEXTS = ("txt", "text")
_MOST = 16  # kinds of members in a sample
_HEADER = 2**20  # bytes of a header; a name has at most a few thousand
_INSIDE = -2  # in place of a size: the number itself stands in place of a place
_VALUES = 1000  # different numbers of a column that the index keeps


class _Member(NamedTuple):
    """One file within a shard."""

    key: str
    ending: str
    offset: int
    size: int


class TarStore(RowStore):
    """A RowStore of shards that are not compressed; see there. A member KEY.ENDING is in the column ENDING.

    Images are bytes; .cls, .id and .index hold a whole number; .txt a text; .npy an array; of the object in a .json,
    its numbers and texts are columns json.FIELD, as the first sample has them.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        super().__init__(files)
        for file in self.files:
            _check_uncompressed(file)
        self._endings, self._open = _read_endings(self.files), OpenFiles(self.files)
        width = 1 + 2 * len(self._endings)  # the shard, then place and size of each kind of member
        index = open_index("tar", self.files, width, self._index, "tar 2")
        self._rows = index.rows
        self._values: dict[str, list[int] | None] = index.facts["values"]
        gaps = dict(zip(self._endings, index.facts["gaps"], strict=True))
        self.columns = {column.name: column for each in self._endings for column in self._describe(each, gaps[each])}

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, name: str, rows: Sequence[int] | np.ndarray) -> Any:
        ending, _, field = name.partition("json.")
        column, at = self.columns[name], 1 + 2 * self._endings.index(ending or "json")
        places = self._rows[np.asarray(rows, dtype=np.int64)]
        if len(places) and places[0, at + 1] == _INSIDE:
            return places[:, at]
        contents = [self._open.read(*place) for place in places[:, [0, at, at + 1]].tolist()]
        if field:
            values = [_read_field(content, field, column, self.label) for content in contents]
            return values if column.kind == "text" else np.asarray(values, dtype=column.dtype)
        if column.kind == "number":
            return np.stack([self._read_array(content, column) for content in contents])
        return [_decode(content, name, self.label) for content in contents] if column.kind == "text" else contents

    def list_values(self, name: str) -> list[Any]:
        if (found := self._values.get(name)) is None:
            problem = f"--data tar: {self.label}: the classes in .{name} are not known before all of them are read"
            raise RequestError(problem, remedy="data.classes=N for class numbers, or data.classes=[…], all labels")
        return list(found)

    def _read_array(self, content: bytes, column: Column) -> np.ndarray:
        found = _load_array(content, column.name, self.label)
        if found.shape != column.shape or found.dtype != column.dtype:
            raise RequestError(
                f"--data tar: {self.label}: a .{column.name} holds {found.dtype} {found.shape}, and {column.dtype} "
                f"{column.shape} in the first sample",
                remedy="arrays of one type and shape",
            )
        return found

    def _describe(self, ending: str, gaps: int) -> Iterator[Column]:
        """The columns of one kind of member, by the first sample that has it."""
        at, last = 2 * self._endings.index(ending) + 1, ending.rpartition(".")[2].lower()
        column = partial(Column, name=ending, null_count=gaps)
        if ending in _NUMBERS:
            yield column(kind="number", dtype="int64", description="a whole number")
        elif f".{last}" in IMAGES:
            yield column(kind="bytes", description="an image")
        elif last in _TEXTS:
            yield column(kind="text", description="a text")
        else:
            row = next((row for row in self._rows[:1000] if row[at + 1] >= 0), None)
            content = b"" if row is None else self._open.read(int(row[0]), int(row[at]), int(row[at + 1]))
            if last == "npy" and content:
                array = _load_array(content, ending, self.label)
                kind = "number" if array.dtype.kind in "biufc" else "other"  # a structure or a text has no numbers
                yield column(kind=kind, shape=array.shape, dtype=str(array.dtype), description="an array")
            elif ending == "json" and content:
                yield from _describe_json(content, gaps, self.label)
            else:
                yield column(kind="other", description=f".{ending} files")

    def _index(self, write: Callable[[Sequence[int]], object]) -> dict[str, Any]:
        values: dict[str, set[int] | None] = {each: set() for each in self._endings if each in _NUMBERS}
        missing = [0] * len(self._endings)
        for number, file in enumerate(self.files):
            for members in _group_members(file):
                row = self._index_sample(number, members, values)
                for at in range(len(missing)):
                    missing[at] += row[2 + 2 * at] == -1
                write(row)
        known = {name: None if found is None else sorted(found) for name, found in values.items()}
        return {"values": known, "gaps": missing}

    def _index_sample(self, shard: int, members: Sequence[_Member], values: dict[str, set[int] | None]) -> list[int]:
        row = [shard, *[-1, -1] * len(self._endings)]
        for member in members:
            where = f"{self.files[shard]}: {member.key}.{member.ending}"
            if member.ending not in self._endings:
                remedy = "the same kinds of members in every sample, and those of a sample side by side"
                raise RequestError(f"--data tar: {where}: the first sample has no .{member.ending}", remedy=remedy)
            place, size = member.offset, member.size
            if member.ending in _NUMBERS:
                place, size = _read_number(self._open.read(shard, member.offset, min(member.size, 100)), where), _INSIDE
                known = values[member.ending]
                if known is not None:
                    known.add(place)
                    values[member.ending] = known if len(known) <= _VALUES else None
            at = 1 + 2 * self._endings.index(member.ending)
            row[at : at + 2] = place, size
        return row


def _read_endings(files: Sequence[Path]) -> list[str]:
    """The kinds of members of the first sample."""
    first = next((members for file in files for members in _group_members(file)), [])
    endings = [member.ending for member in first]
    if not endings or len(endings) > _MOST or len(set(endings)) < len(endings):
        raise RequestError(
            f"--data tar: {files[0]}: the first sample has {len(endings)} members ({', '.join(endings[:20])})",
            remedy=f"for example members KEY.jpg and KEY.cls; at most {_MOST}, and each ending once",
        )
    return endings


def _check_uncompressed(file: Path) -> None:
    with file.open("rb") as opened:
        head = opened.read(6)
    marks = {b"\x1f\x8b": "gunzip", b"BZh": "bunzip2", b"\xfd7zXZ": "unxz", b"\x28\xb5\x2f\xfd": "unzstd"}
    for mark, command in marks.items():
        if head.startswith(mark):
            problem = f"--data tar: {file} is compressed, so its members can't be read in random order"
            raise RequestError(problem, remedy=f"{command} {file.name}, once")


class _HeaderReader(BufferedReader):
    """A shard of which headers are read; the members themselves are skipped."""

    def read(self, size: int | None = -1) -> bytes:
        """Read some bytes of a header. Raises tarfile.ReadError if it is longer than any is: it would be kept whole."""
        if size is None or not 0 <= size <= _HEADER:
            raise tarfile.ReadError(f"a header of {size:,} bytes, at most {_HEADER:,}")
        return super().read(size)


def _group_members(file: Path) -> Iterator[list[_Member]]:
    """The samples of a shard, each as its members."""
    waiting: list[_Member] = []
    try:
        with _HeaderReader(FileIO(file)) as headers, tarfile.open(fileobj=headers, mode="r:") as archive:
            while (info := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # it would keep them all
                if not info.isreg():
                    continue
                folder, _, name = info.name.rpartition("/")
                base, _, ending = name.partition(".")
                if not base or not ending or any(map(is_hidden, folder.split("/"))):
                    continue
                key = f"{folder}/{base}"
                if waiting and waiting[0].key != key:
                    yield waiting
                    waiting = []
                if info.size < 0:
                    raise tarfile.ReadError(f"{info.name} has {info.size} bytes")
                waiting.append(_Member(key, ending, info.offset_data, info.size))
    except Exception as error:  # tarfile raises half a dozen types for damaged and hostile headers
        raise RequestError(f"--data tar: {file}: {error}", remedy="copy or write the shard anew") from error
    if waiting:
        yield waiting


def _read_number(text: bytes, where: str) -> int:
    if (match := _INTEGER.fullmatch(text.strip())) and -(2**63) <= (number := int(match[0])) < 2**63:
        return number
    problem = f"--data tar: {where} holds {text[:20]!r}, not a 64-bit integer in plain digits"
    raise RequestError(problem, remedy="the number of the class, as text; codes belong in a .json")


def _load_array(content: bytes, ending: str, label: str) -> np.ndarray:
    try:
        return np.lib.format.read_array(BytesIO(content), allow_pickle=False)
    except (ValueError, OSError, EOFError, MemoryError, RecursionError) as error:
        raise RequestError(f"--data tar: {label}: a .{ending} is no array ({error})", remedy="np.save(…)") from error


def _decode(content: bytes, ending: str, label: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"--data tar: {label}: a .{ending}: {error}", remedy="texts in UTF-8") from error


def _describe_json(content: bytes, gaps: int, label: str) -> Iterator[Column]:
    try:
        record = parse_json(content)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"--data tar: {label}: a .json is not JSON ({error})", remedy="JSON in UTF-8") from error
    for field, value in record.items() if isinstance(record, dict) else ():
        if isinstance(value, str):
            yield Column(name=f"json.{field}", kind="text", null_count=gaps, description="a text")
        elif isinstance(value, bool | int | float):
            dtype = "float64" if isinstance(value, float) else "int64"
            yield Column(name=f"json.{field}", kind="number", dtype=dtype, null_count=gaps, description="a number")


def _read_field(content: bytes, field: str, column: Column, label: str) -> Any:
    """The value of a field, of the kind that the first sample has."""
    try:
        value = parse_json(content)[field]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RequestError(
            f"--data tar: {label}: a .json without {field!r} ({error})", remedy="the same fields in every sample"
        ) from error
    wanted: Any = str if column.kind == "text" else int if column.dtype == "int64" else float | int
    if not isinstance(value, wanted):
        remedy = "whole numbers in all" if wanted is int and isinstance(value, float) else column.description
        raise RequestError(f"--data tar: {label}: {field!r} in a .json is {value!r}", remedy=remedy)
    return value
