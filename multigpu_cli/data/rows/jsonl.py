"""Rows of JSON lines, read by their places in the files; the index is made once."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from multigpu_cli.data.files import UNCHANGED, OpenFiles, find_lines, parse_json
from multigpu_cli.data.rows.store import Column, RowStore, open_index
from multigpu_cli.errors import RequestError

_VALUES = 1000  # different values of a field that the index keeps


class JsonStore(RowStore):
    """A RowStore of JSON lines, one object per line; empty lines do not count. See there.

    The first pass reads every line, so that types hold for all of them, and writes an index beside the files.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        super().__init__(files)
        index = open_index("jsonl", self.files, 3, self._index, "jsonl 2")
        self._rows, self._open = index.rows, OpenFiles(self.files)
        fields = index.facts["fields"]
        self.columns = {
            name: Column(
                name=name,
                kind=field["kind"],
                shape=tuple(field["shape"]),
                dtype=field["dtype"],
                null_count=len(self._rows) - field["rows"],
                first_null=field["gap"],
                description=_describe(field["kind"], field["shape"]),
            )
            for name, field in fields.items()
        }
        self._values = {name: field["values"] for name, field in fields.items()}
        self._last: tuple[bytes, list[dict[str, Any]]] = b"", []
        if not len(self._rows):
            raise RequestError(f"--data jsonl: {self.label}: no rows", remedy="one JSON object per line")

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, name: str, rows: Sequence[int] | np.ndarray) -> Any:
        column, records = self.columns[name], self._parse(np.asarray(rows, dtype=np.int64))
        try:
            values = [record[name] for record in records]
            return values if column.kind == "text" else np.asarray(values, dtype=column.dtype)
        except (KeyError, TypeError, ValueError) as error:
            raise RequestError(f"--data jsonl: {self.label} has changed: no {name!r}", remedy=UNCHANGED) from error

    def list_values(self, name: str) -> list[Any]:
        if self._values[name] is None:
            raise RequestError(
                f"--data jsonl: {self.label}: {name!r} has more than {_VALUES:,} different values",
                remedy="data.kind=regression, or data.classes=N, where they are numbers of classes",
            )
        return list(self._values[name])

    def _parse(self, rows: np.ndarray) -> list[dict[str, Any]]:
        """The records of some rows; asked for once for each field, so the last ones are kept."""
        key = rows.tobytes()
        if self._last[0] != key:
            where, places = f"--data jsonl: {self.label}", self._rows[rows].tolist()
            self._last = key, [_parse_line(self._open.read(*place), where) for place in places]
        return self._last[1]

    def _index(self, write: Callable[[Sequence[int]], object]) -> dict[str, Any]:
        fields: dict[str, dict[str, Any]] = {}
        first = ""
        for number, file in enumerate(self.files):
            with file.open("rb") as opened:
                for line, at, text in find_lines(opened):
                    location = f"{file}:{line}"
                    first = first or location
                    _note_record(fields, _parse_line(text, location), location, first)
                    write((number, at, len(text)))
        for field in fields.values():
            field["values"] = None if field["values"] is None else sorted(field["values"])
        return {"fields": fields}


def _parse_line(text: bytes, place: str) -> dict[str, Any]:
    try:
        record = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{place}: not JSON ({error})", remedy="one JSON object per line, as UTF-8") from error
    if not isinstance(record, dict):
        raise RequestError(f"{place}: a {type(record).__name__}, not an object", remedy="one JSON object per line")
    return record


def _note_record(fields: dict[str, dict[str, Any]], record: dict[str, Any], place: str, first: str) -> None:
    """Add what a record teaches of its fields; `first` is the location of the first record."""
    types = {name: form for name, value in record.items() if (form := _classify(value))[0] != "null"}
    for name in fields.keys() - types.keys():
        fields[name]["gap"] = fields[name]["gap"] or place
    for name, (kind, shape, dtype) in types.items():
        value, known = record[name], fields.get(name)
        if known is None:
            values: set[Any] | None = set() if not shape and kind != "other" and dtype != "float64" else None
            known = fields[name] = {"kind": kind, "shape": shape, "dtype": dtype, "rows": 0, "values": values}
            known["gap"] = "" if place == first else first
        if (kind, shape) != (known["kind"], known["shape"]):
            raise RequestError(
                f"{place}: {name!r} is {_describe(kind, shape)}, and {_describe(known['kind'], known['shape'])} before",
                remedy="one type for each field, and lists of one length",
            )
        if dtype != known["dtype"]:
            known["dtype"], known["values"] = "float64", None
        known["rows"] += 1
        if known["values"] is not None:
            known["values"].add(value)
            if len(known["values"]) > _VALUES:
                known["values"] = None


def _classify(value: Any) -> tuple[str, list[int], str]:
    """Kind, shape and type of a value; the kind of null, NaN and infinity, also in a list, is null."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "null", [], ""
    if isinstance(value, str):
        return "text", [], ""
    if isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63):
        return "number", [], "float64" if isinstance(value, float) else "int64"
    if isinstance(value, list):
        try:
            array = np.array(value)
        except ValueError:  # lists of different lengths
            return "other", [], ""
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            return "null", [], ""
        if array.dtype.kind in "iuf" and array.size:
            return "number", list(array.shape), "float64" if array.dtype.kind == "f" else "int64"
    return "other", [], ""


def _describe(kind: str, shape: Sequence[int]) -> str:
    return f"numbers {tuple(shape)}" if shape else {"text": "a text", "number": "a number"}.get(kind, "something else")
