"""Cells of a column as numbers: plain, grouped by thousands, with a unit, or dates; and words for missing cells.

Numbers are ASCII digits with a sign, a point and an exponent. Codes are texts, although float() reads them: 1_1, 007,
and digits of other alphabets.
"""

import math
import re
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from functools import cache
from typing import NamedTuple

import numpy as np

from multigpu_cli.data.source import FEW

_MISSING = {"", "na", "n/a", "nan", "null", "none", "?", "-"}
_LONGEST_GAP = max(map(len, _MISSING))
MOST = 0.9  # if this share of a column are numbers, the other cells look like mistakes
_UNITS = "$€£¥₹%"
_PERCENT = "%"  # without it, 0.05 may be 5 %; a price without its sign is the same number
_GROUPS = ("", *",.' ")  # signs between groups of three digits
_SPACES = str.maketrans({"\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u2019": "'", "\u2212": "-"})
_LEADING_ZERO = re.compile(r"\n[+-]?0[0-9]")  # in cells that each follow a line break
_NUMBER_LIKE = re.compile(rf"\(?[+-]?[{_UNITS}]? ?[+-]?\(?[0-9][0-9.,:/' TZeE+-]*[{_UNITS}]?\)?")
_WITH_UNIT = re.compile(rf"[+-]?[{_UNITS}]?[0-9]+([.,][0-9]+)* ?[^\W\d_]{{1,4}}[.²³]?")
_NEGATIVE = re.compile(r"([^()]?)\(([^()]+)\)")  # accountants write negative numbers in brackets: (500), $(500), ($500)
_DIGIT = re.compile(r"[0-9]")
_QUANTITY = re.compile(r"[0-9][.,][0-9]|^\W*[0-9]+ ?[^\W\d_]+$")  # with a fraction, or 40 years
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}([ T][0-9]{2}:[0-9]{2}\S*)?")

Parsed = tuple[np.ndarray, np.ndarray]


class Notation(NamedTuple):
    """How the numbers of a column are written."""

    decimal: str = "."  # the sign before the fraction
    group: str = ""  # the sign between groups of three digits, in numbers that have one
    unit: str = ""  # a sign before or after each number; a currency sign may be missing
    is_date: bool = False  # ISO 8601; the number is that of days since 1970-01-01, in UTC

    @property
    def is_amount(self) -> bool:
        """Return whether even a few distinct whole numbers are not classes: $5, 5 %, 1,000, or dates."""
        return bool(self.unit or self.group or self.is_date)

    def read(self, cell: str) -> float | None:
        """Return the finite number in a cell, or None."""
        if self.is_date:
            return _read_date(cell)
        text = cell.translate(_SPACES)
        if bracketed := _NEGATIVE.fullmatch(text):
            text = f"-{bracketed[1]}{bracketed[2]}"
        match = _compile(self).fullmatch(text)
        least = 1 if self.unit == _PERCENT else 0
        if match is None or (self.unit and not least <= text.count(self.unit) <= 1):
            return None
        return to_number("".join(match.groups()).replace(self.group, "").replace(self.decimal, "."))

    def parse(self, cells: Sequence[str]) -> Parsed:
        """Return (n,) float64, nan if a cell holds a word or nothing, and (n,) bool, whether it holds a word."""
        gaps = {cell for cell in {cell for cell in cells if len(cell) <= _LONGEST_GAP} if is_missing(cell)}
        text = "\n".join(["", *cells])
        if self == PLAIN and _has_no_codes(text):  # float() reads what to_number does, and in C
            try:
                texts = ("nan" if cell in gaps else cell for cell in cells) if gaps else cells
                numbers = np.fromiter(map(float, texts), dtype=np.float64, count=len(cells))
                if np.isfinite(numbers).sum() == len(cells) - (sum(map(gaps.__contains__, cells)) if gaps else 0):
                    return numbers, np.zeros(len(cells), dtype=bool)
            except ValueError:
                pass  # there are words, so cells are read one by one
        values = {cell: None if cell in gaps else self.read(cell) for cell in set(cells)}
        numbers = np.array([values[cell] for cell in cells], dtype=np.float64)
        return numbers, np.isnan(numbers) & np.array([cell not in gaps for cell in cells], dtype=bool)

    @classmethod
    def learn(cls, cells: Collection[str], decimals: str) -> "tuple[Notation, str]":
        """Return the notation that most of the cells fit, and a warning if they fit another one as well, or nothing.

        Args:
            cells: different cells, none of which is missing.
            decimals: the decimal signs that may occur, the likeliest first.
        """
        if sum(map(is_number_like, cells)) < MOST * len(cells):
            return PLAIN, ""
        text = "".join(cells).translate(_SPACES)
        unit = max(_UNITS, key=text.count)
        unit *= unit in text
        others = [cls(sign, group, unit) for sign in decimals for group in _GROUPS if sign != group and group in text]
        plain = [PLAIN] * ("." in decimals)  # preferred to others that fit as many
        notations = [*plain, *others, PLAIN, cls(is_date=True)]
        values = {notation: [notation.read(cell) for cell in cells] for notation in notations}
        best = min(values, key=lambda notation: values[notation].count(None))
        fewest = values[best].count(None)
        if len(cells) - fewest < MOST * len(cells):
            return PLAIN, ""
        for rival in (each for each in values if each.decimal in decimals and values[each].count(None) == fewest):
            for cell, value, other in zip(cells, values[best], values[rival], strict=True):
                if value is not None and other not in (None, value):
                    sign = "comma" if rival.decimal == "," else "point"
                    return best, f"{cell!r} is read as {value:.12g}; --set data.decimal={sign} if it is {other:.12g}"
        return best, ""


PLAIN, DECIMAL_COMMA = Notation(), Notation(",")


@cache
def _compile(notation: Notation) -> re.Pattern[str]:
    decimal, group, unit = map(re.escape, notation[:3])
    whole = f"(?:[0-9]{{1,3}}(?:{group}[0-9]{{3}})+|[0-9]*)" if group else "[0-9]*"
    before, after = (f"(?:{unit} ?)?", f"(?: ?{unit})?") if unit else ("", "")
    return re.compile(f"([+-]?){before}([+-]?{whole}(?:{decimal}[0-9]*)?(?:[eE][+-]?[0-9]+)?){after}")


def _read_date(cell: str) -> float | None:
    try:
        moment = datetime.fromisoformat(cell) if _DATE.fullmatch(cell) else None
    except ValueError:  # such as month 13
        return None
    return moment.replace(tzinfo=moment.tzinfo or UTC).timestamp() / 86_400 if moment else None


def is_number_like(cell: str) -> bool:
    """Return whether a cell is of digits and the signs of numbers, dates and times; so are many codes."""
    return _NUMBER_LIKE.fullmatch(cell.translate(_SPACES)) is not None


def has_unit(cell: str) -> bool:
    """Return whether a cell is a number with a short word behind it, as in 12 kg or 3k; so are some codes."""
    return _WITH_UNIT.fullmatch(cell.translate(_SPACES)) is not None


def describe_numbers_as_classes(column: str, texts: Collection[str], num_rows: int) -> str:
    """Return a warning if a class for each of a target's different texts looks like a mistake, or an empty string.

    They are more than `FEW`, and most contain a number. Either there are less than ten rows for each, or most are
    written as quantities are, and labels are not: with a fraction, or with a word behind the number.

    Args:
        column: the file and the column, for the message.
    """

    def is_most(pattern: re.Pattern[str]) -> bool:
        return 2 * sum(pattern.search(text) is not None for text in texts) > len(texts)

    is_rare = 10 * len(texts) > num_rows
    if len(texts) <= FEW or not is_most(_DIGIT) or not (is_rare or is_most(_QUANTITY)):
        return ""
    count, example = f"{len(texts):,}", next(iter(texts))
    return (
        f"{column}: {count} different texts such as {example!r} are {count} classes, in {num_rows:,} rows; if they are "
        "numbers, write them as 1234.5; if they are classes, --set data.kind=classification"
    )


def is_missing(cell: str) -> bool:
    """Return whether a cell says that it holds nothing: empty, NA, nan, ?, …"""
    return len(cell) <= _LONGEST_GAP and cell.lower() in _MISSING


def list_missing_words() -> list[str]:
    """Return the words that mean that a cell holds nothing, in lower case."""
    return sorted(_MISSING)


def to_number(cell: str) -> float | None:
    """Return the finite number that a cell writes plainly, or None."""
    try:
        value = float(cell) if _has_no_codes(f"\n{cell}") else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _has_no_codes(text: str) -> bool:
    """Return whether float() can be trusted with cells, each after a line break: it reads some codes as numbers."""
    return text.isascii() and "_" not in text and not _LEADING_ZERO.search(text)
