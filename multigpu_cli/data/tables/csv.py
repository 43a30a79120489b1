"""A CSV file as named columns of text: compression, encoding, separators, header, decimal commas.

Python's own csv module cuts the lines into cells.
"""

import codecs
import csv
import gc
import gzip
import io
import math
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from multigpu_cli.config.types import ValueType, quote_value
from multigpu_cli.errors import RequestError, did_you_mean

_MISSING = {"", "na", "n/a", "nan", "null", "none", "?", "-"}
_LONGEST_GAP = max(map(len, _MISSING))
_SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "space": " ", "bar": "|"}
_LOOK = 50  # rows that show how a file is written
_COMMA = re.compile(r"[+-]?\d+(,\d+)?([eE][+-]?\d+)?")  # 3,14
_GROUPED = re.compile(r"[+-]?\d{1,3}(\.\d{3})+(,\d+)?")  # 1.234,56


def _parse_separator(value: Any) -> str:
    word = str(value)
    if word != "auto" and word not in _SEPARATORS and len(word) != 1:
        raise ValueError(f"must be auto, {', '.join(_SEPARATORS)}, or one character, not {quote_value(value)}")
    return word


SEPARATOR = ValueType("NAME", _parse_separator)


class CsvFormat(NamedTuple):
    """How a file is written."""

    separator: str = "auto"  # auto (tries comma, semicolon, tab), comma, semicolon, tab, space, bar, or one character
    header: str = "first"  # first: the first row names the columns; none: they are called 0, 1, 2, …
    decimal: str = "auto"  # auto, which takes 3,14 for a number where the separator is no comma; comma; or point


Parsed = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, eq=False)
class CsvTable:
    """A file as text, spaces around cells removed."""

    path: Path
    columns: list[str]
    rows: list[list[str]]
    lines: Sequence[int]  # which line of the file each row begins in, from 1
    warnings: tuple[str, ...]  # what looks wrong but may be meant
    unnamed: tuple[str, ...] = ()  # columns without a name in the file, called column_1, … by their places
    _parsed: dict[str, Parsed] = field(default_factory=dict, init=False, repr=False)

    def select(self, column: str) -> list[str]:
        """The cells of a column; RequestError: there is none of that name."""
        if column not in self.columns:
            raise RequestError(f"{self.path}: there is no column {column!r}", remedy=did_you_mean(column, self.columns))
        at = self.columns.index(column)
        return [row[at] for row in self.rows]

    def parse(self, column: str) -> Parsed:
        """A column as (n,) float64, nan where a cell is no finite number; and (n,) bool, whether it is no gap either.

        RequestError: there is none of that name.
        """
        if column not in self._parsed:
            self._parsed[column] = _parse_numbers(self.select(column))
        return self._parsed[column]

    def describe_cell(self, column: str, row: int) -> str:
        """A cell with its place, for messages."""
        return f"{self.path}:{self.lines[row]}: {self.select(column)[row]!r} in column {column!r}"


def is_missing(cell: str) -> bool:
    """Whether a cell says that it holds nothing: empty, NA, nan, ?, …"""
    return cell.lower() in _MISSING


def to_number(cell: str) -> float | None:
    """A finite number, or None."""
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _parse_numbers(cells: Sequence[str]) -> Parsed:
    """See `CsvTable.parse`; numbers, with gaps or without, are read in C."""
    gaps = set(filter(is_missing, {cell for cell in cells if len(cell) <= _LONGEST_GAP}))
    try:
        found = ("nan" if cell in gaps else cell for cell in cells) if gaps else cells
        numbers = np.fromiter(map(float, found), dtype=np.float64, count=len(cells))
        if np.isfinite(numbers).sum() == len(cells) - (sum(map(gaps.__contains__, cells)) if gaps else 0):
            return numbers, np.zeros(len(cells), dtype=bool)
    except ValueError:
        pass
    values = {cell: to_number(cell) for cell in set(cells)}
    numbers = np.array([values[cell] for cell in cells], dtype=np.float64)
    return numbers, np.isnan(numbers) & np.array([cell not in gaps for cell in cells], dtype=bool)


def list_missing_words() -> list[str]:
    """The words that mean that a cell holds nothing, in lower case."""
    return sorted(_MISSING)


def read_csv(path: Path, format: CsvFormat) -> CsvTable:
    """Read a whole file; empty lines are left out. A message names the line where it can't be read as a table."""
    text = _read_text(path)
    hint = re.match(r"sep=(.)\r?\n", text)  # which Excel writes, and reads
    separator = _SEPARATORS.get(format.separator, format.separator)
    if separator == "auto":
        separator = hint[1] if hint else _find_separator(text)
    collects = gc.isenabled()
    gc.disable()  # it would look again and again at rows that all stay
    try:
        rows, lines = _parse(path, text, separator)
    finally:
        if collects:
            gc.enable()
    if hint:
        rows, lines = rows[1:], lines[1:]
    if not rows:
        raise RequestError(f"--data csv: {path}: no rows")
    _check_lengths(path, rows, lines)
    unnamed: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    if format.header == "none":
        columns = [str(number) for number in range(len(rows[0]))]
    else:
        head, rows, lines = rows[0], rows[1:], lines[1:]
        columns = _name_columns(head)
        unnamed = tuple(name for name, written in zip(columns, head, strict=True) if not written)
        warnings = _check_header(path, head, columns, rows)
    if format.decimal == "comma" or (format.decimal == "auto" and separator != ","):
        _read_decimal_commas(path, columns, rows, lines)
    return CsvTable(path, columns, rows, lines, warnings, unnamed)


def _name_columns(head: list[str]) -> list[str]:
    """The names in the first row; a column without one is called by its place, from 1."""
    names: list[str] = []
    for place, written in enumerate(head, start=1):
        name = written or f"column_{place}"
        while not written and name in [*head, *names]:
            name += "_"
        names.append(name)
    return names


def _looks_like_data(columns: list[str], rows: list[list[str]]) -> bool:
    """Whether names of columns are rather values: numbers above all numbers, or words that come again below."""
    below = [[row[at] for row in rows[:_LOOK] if not is_missing(row[at])] for at in range(len(columns))]
    numeric = [at for at, cells in enumerate(below) if cells and None not in map(to_number, cells)]
    if numeric:
        names = [columns[at] for at in numeric]
        return any(names) and all(is_missing(name) or to_number(name) is not None for name in names)
    return bool(rows) and all(name in cells for name, cells in zip(columns, below, strict=True))


def _read_text(path: Path) -> str:
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except FileNotFoundError as missing:
        there = [each.name for each in path.parent.glob("*") if each.is_file()]
        raise RequestError(
            f"{path}: there is no such file", remedy=did_you_mean(path.name, there) if there else "--data-dir"
        ) from missing
    except (OSError, EOFError, zlib.error) as error:
        raise RequestError(f"--data csv: {path}: {error}", remedy="a CSV file in UTF-8, gzipped or not") from error
    wide = content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # Excel's "Unicode text"
    try:
        text = content.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise RequestError(
            f"--data csv: {path}:{line}: not UTF-8 (byte 0x{content[error.start]:02x})",
            remedy="save it as UTF-8: iconv -f latin1 -t utf-8, for instance",
        ) from error
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise RequestError(f"--data csv: {path}:{line}: a zero byte: not a text file", remedy="a CSV file in UTF-8")
    return text


def _find_separator(text: str) -> str:
    """The one that cuts the first rows into as many cells each; where none does, the one that cuts the first most."""
    head, widths = text[:100_000], {}
    for separator in "\t;,":
        try:
            rows = [row for row in islice(csv.reader(io.StringIO(head, newline=""), delimiter=separator), _LOOK) if row]
        except csv.Error:
            continue
        whole = rows[:-1] if len(head) < len(text) and len(rows) > 1 else rows
        widths[separator] = [len(row) for row in whole]
    even = [separator for separator, found in widths.items() if len(set(found)) == 1 and found[0] > 1]
    return even[0] if even else max(",;\t", key=lambda each: (widths.get(each) or [0])[0])


def _parse(path: Path, text: str, separator: str) -> tuple[list[list[str]], list[int]]:
    """All rows that hold something, and the lines where they begin."""
    plain = text.replace("\r\n", "\n").split("\n")
    short = max(map(len, plain)) <= csv.field_size_limit()
    if short and separator != " " and not re.search(r'"|\r(?!\n)', text):  # the same as below, and faster
        rows = [list(map(str.strip, line.split(separator))) for line in plain]
        lines = [number for number, row in enumerate(rows, start=1) if len(row) > 1 or any(row)]
        return [rows[number - 1] for number in lines], lines
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True, strict=True)
    rows, lines, line = [], [], 1
    try:
        for row in reader:
            cells = [cell.strip() for cell in row]
            if len(cells) > 1 or any(cells):
                rows.append(cells)
                lines.append(line)
            line = reader.line_num + 1
    except csv.Error as error:
        raise RequestError(
            f"--data csv: {path}:{line}: {error}",
            remedy='close each quote, and write one within quotes twice: "a ""b"" c"',
        ) from error
    return rows, lines


def _check_lengths(path: Path, rows: list[list[str]], lines: list[int]) -> None:
    for row, line in zip(rows, lines, strict=True) if len(set(map(len, rows))) > 1 else ():
        if len(row) != len(rows[0]):
            raise RequestError(
                f"--data csv: {path}:{line}: {len(row)} cells for {len(rows[0])} columns",
                remedy="the same number in every line; quote cells that contain the separator, "
                "or say which it is: --set data.separator=semicolon",
            )


def _check_header(path: Path, head: list[str], columns: list[str], rows: list[list[str]]) -> tuple[str, ...]:
    """Warnings; RequestError where the first row has a name twice, or nothing comes after it."""
    like_data = _looks_like_data(head, rows)
    remedy = "--set data.header=none, if the first row is data" if like_data else "another name for one of them"
    name, count = Counter(columns).most_common(1)[0]
    if count > 1:
        raise RequestError(f"--data csv: {path}: two columns have the same name, {name!r}", remedy=remedy)
    if not rows:
        raise RequestError(f"--data csv: {path}: no rows below the header")
    if not like_data:
        return ()
    first = ", ".join(columns[:3]) + (", …" if len(columns) > 3 else "")
    return (f"{path}: the first row looks like data ({first}), but is read as names; --set data.header=none if so",)


def _read_decimal_commas(path: Path, columns: list[str], rows: list[list[str]], lines: list[int]) -> None:
    """Write a point for the comma in columns of numbers; words among them stay, and are warned of like others."""
    for at, name in enumerate(columns):
        if not any("," in row[at] for row in rows):
            continue
        there = [number for number, row in enumerate(rows) if not is_missing(row[at])]
        cells = [(n, rows[n][at]) for n in there]
        ways = (_COMMA.fullmatch, _GROUPED.fullmatch, to_number)
        written = [number for number, cell in cells if any(way(cell) is not None for way in ways)]
        commas = [number for number in written if "," in rows[number][at]]
        if not commas or 2 * len(written) <= len(there):
            continue
        if other := [number for number in written if not _COMMA.fullmatch(rows[number][at])]:
            comma = next((number for number in commas if number not in other), commas[0])
            raise RequestError(
                f"--data csv: {path}:{lines[other[0]]}: {rows[other[0]][at]!r} in column {name!r}, and "
                f"{rows[comma][at]!r} in line {lines[comma]}: is the decimal separator a comma or a point?",
                remedy="one way of writing, without separators of thousands; --set data.decimal=point reads as words "
                "what has a comma",
            )
        for number in commas:
            rows[number][at] = rows[number][at].replace(",", ".")
