"""A CSV file as named columns of text: compression, encoding, separators, header, decimal commas.

Python's own csv module cuts the lines into cells.
"""

import codecs
import csv
import gc
import gzip
import io
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from multigpu_cli.config.regular_files import refuse_special_file
from multigpu_cli.config.types import ValueType, quote_value
from multigpu_cli.data.notation import DECIMAL_COMMA, PLAIN, Notation, Parsed, is_missing, is_number_like
from multigpu_cli.errors import RequestError, did_you_mean

_SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "space": " ", "bar": "|"}
_LOOK = 50  # rows that show how a file is written
_UNPACKED, _RATIO = 2**28, 200  # bytes, or times its size, that a gzipped file may unpack to; tables pack 3 to 50 times
_DOTTED = re.compile(r"[+-]?[1-9][0-9]{0,2}(\.[0-9]{3})+")  # 1.234, which is 1234 or 1.234


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
    decimal: str = "auto"  # the sign before a fraction: auto, comma or point; it settles if 1,234 is 1234

    def list_decimals(self, likeliest: str) -> str:
        """Return the decimal signs that numbers may have, the likeliest first; `likeliest` are those of auto."""
        return {"auto": likeliest, "comma": ",", "point": "."}[self.decimal]


@dataclass(frozen=True, eq=False)
class CsvTable:
    """A file as text, spaces around cells removed.

    A copy with other rows shares `notations` and `doubts`. A table that is given the notations of another is read as
    that one is.
    """

    path: Path
    columns: list[str]
    rows: list[list[str]]
    lines: Sequence[int]  # which line of the file each row begins in, from 1
    warnings: tuple[str, ...] = ()  # a first row that looks like data
    unnamed: tuple[str, ...] = ()  # columns without a name in the file, called column_1, … by their places
    decimals: str = ".,"  # the decimal signs that numbers may have, the likeliest first
    notations: dict[str, Notation] = field(default_factory=dict)  # of the columns that were parsed
    doubts: dict[str, str] = field(default_factory=dict)  # a warning about the cells of a column
    _parsed: dict[str, Parsed] = field(default_factory=dict, init=False, repr=False)

    def select(self, column: str) -> list[str]:
        """The cells of a column; RequestError: there is none of that name."""
        if column not in self.columns:
            raise RequestError(f"{self.path}: there is no column {column!r}", remedy=did_you_mean(column, self.columns))
        at = self.columns.index(column)
        return [row[at] for row in self.rows]

    def count_cells(self, column: str) -> Counter[str]:
        """Count the different cells of a column that are not missing, in the order of the file."""
        return Counter({cell: n for cell, n in Counter(self.select(column)).items() if not is_missing(cell)})

    def parse(self, column: str) -> Parsed:
        """Return a column as (n,) float64, nan if a cell is a word or missing, and (n,) bool, whether it is a word.

        The first call learns the column's notation, from all cells. RequestError: there is no such column.
        """
        if column not in self._parsed:
            cells, is_known = self.select(column), column in self.notations
            self._parsed[column] = self.notations.setdefault(column, PLAIN).parse(cells)
            if not is_known and (self._parsed[column][1].any() or self.decimals == ","):
                notation = self.learn_notation(column)
                if notation not in (PLAIN, DECIMAL_COMMA):  # decimal commas were replaced by points before
                    self.notations[column] = notation
                    self._parsed[column] = notation.parse(cells)
        return self._parsed[column]

    def learn_notation(self, column: str) -> Notation:
        """Return how a column writes its numbers, and note in `doubts` if that is not certain."""
        notation, doubt = Notation.learn(self.count_cells(column), self.decimals)
        if doubt:
            self.doubts[column] = f"{self.path}: column {column!r}: {doubt}"
        return notation

    def describe_cell(self, column: str, row: int) -> str:
        """A cell with its place, for messages."""
        return f"{self.path}:{self.lines[row]}: {self.select(column)[row]!r} in column {column!r}"


def read_csv(path: Path, format: CsvFormat) -> CsvTable:
    """Read a file except for its empty lines; RequestError, with the line: it is not a table."""
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
    if odd := next((at for at, row in enumerate(rows) if len(row) != len(rows[0])), 0):
        raise RequestError(
            f"--data csv: {path}:{lines[odd]}: {len(rows[odd])} cells for {len(rows[0])} columns",
            remedy="the same number in every line; quote cells that contain the separator, "
            "or say which it is: --set data.separator=semicolon",
        )
    decimals = format.list_decimals(".," if separator == "," else ",.")
    if format.header == "none":
        return CsvTable(path, list(map(str, range(len(rows[0])))), rows, lines, decimals=decimals)
    head, rows, lines = rows[0], rows[1:], lines[1:]
    columns = _name_columns(head)
    unnamed = tuple(name for name, written in zip(columns, head, strict=True) if not written)
    return CsvTable(path, columns, rows, lines, _check_header(path, head, columns, rows), unnamed, decimals)


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
    numeric = [at for at, cells in enumerate(below) if cells and None not in map(PLAIN.read, cells)]
    if numeric:
        names = [columns[at] for at in numeric]
        return any(names) and all(is_missing(name) or PLAIN.read(name) is not None for name in names)
    return bool(rows) and all(name in cells for name, cells in zip(columns, below, strict=True))


def _unpack(path: Path, content: bytes) -> bytes:
    """Unpack the gzipped `content` of a file; RequestError if that is far more than any table packs so well."""
    limit = max(_UNPACKED, _RATIO * len(content))
    with gzip.open(io.BytesIO(content)) as file:
        unpacked = file.read(limit + 1)
    if len(unpacked) > limit:
        problem = f"--data csv: {path} unpacks to more than {_RATIO} times its size, beyond {limit:,} bytes"
        raise RequestError(problem, remedy=f"gunzip {path.name}, if that is what you expect of it")
    return unpacked


def _read_text(path: Path) -> str:
    refuse_special_file(path)
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = _unpack(path, content)
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
        problem = f"--data csv: {path}:{line}: not UTF-8 (byte 0x{content[error.start]:02x})"
        raise RequestError(problem, remedy="save it as UTF-8: iconv -f latin1 -t utf-8, for instance") from error
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
        remedy = 'close each quote, and write one within quotes twice: "a ""b"" c"'
        raise RequestError(f"--data csv: {path}:{line}: {error}", remedy=remedy) from error
    return rows, lines


def _check_header(path: Path, head: list[str], columns: list[str], rows: list[list[str]]) -> tuple[str, ...]:
    """Warnings; RequestError if the first row has a name twice, or nothing comes after it."""
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


def read_decimal_commas(table: CsvTable, known: Mapping[str, Notation]) -> None:
    """Write a point for the comma in columns of numbers; words among them stay, and are warned of like others.

    A column with another notation stays as it is, whether that is known from other rows or found here.
    """
    for at, name in enumerate(table.columns if table.decimals[0] == "," else ()):
        cells = table.count_cells(name)
        dotted = [cell for cell in cells if "." in cell]
        is_dotted = bool(dotted) and all(map(_DOTTED.fullmatch, dotted))
        if known.get(name, PLAIN) != PLAIN or not (is_dotted or any("," in cell for cell in cells)):
            continue
        notation = table.learn_notation(name)
        if notation == PLAIN:
            _check_decimal_signs(table, name, cells)
        if notation == DECIMAL_COMMA:
            table.notations[name] = PLAIN
            for row in table.rows:
                row[at] = row[at].replace(",", ".") if DECIMAL_COMMA.read(row[at]) is not None else row[at]


def _check_decimal_signs(table: CsvTable, name: str, cells: Counter[str]) -> None:
    """Raise RequestError if a column has numbers with a decimal comma, and others with a point."""
    commas = [cell for cell in cells if "," in cell and DECIMAL_COMMA.read(cell) is not None]
    points = [cell for cell in cells if "." in cell and PLAIN.read(cell) is not None]
    if commas and points and 2 * sum(map(is_number_like, cells)) > len(cells):
        lines = [table.lines[table.select(name).index(signs[0])] for signs in (points, commas)]
        raise RequestError(
            f"--data csv: {table.path}:{lines[0]}: {points[0]!r} in column {name!r}, and {commas[0]!r} in line "
            f"{lines[1]}: is the decimal separator a comma or a point?",
            remedy="one way of writing; --set data.decimal=point reads as words what has a decimal comma",
        )
