"""The types of the fields that code reads of the small files of runs and studies, which a stranger may have written.

They are in fields.json, by kind of file, kind of line, or part of these. A field has one of the types in its list: the
name of a check below, or of another entry. An entry has the types of an object's fields by name, under "*" those of all
names that are not listed; or under "[]" those of a list's elements. Readers check a file or a line once, as a whole, so
that the code behind them can rely on the types.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CHECKS: dict[str, Callable[[Any], bool]] = {
    "missing": lambda value: value is ...,
    "null": lambda value: value is None,
    "text": lambda value: isinstance(value, str),
    "count": lambda value: isinstance(value, int) and 0 <= value <= 2**53,  # floats have each of these numbers
    "size": lambda value: isinstance(value, int) and 0 < value <= 2**53,
    "time": lambda value: isinstance(value, int | float) and 0 <= value < 2.5e11,  # Unix seconds, to the year 9892
    "finite": lambda value: isinstance(value, int | float) and abs(value) < 1e100,  # so is a product of two
    "special": lambda value: isinstance(value, float) or value in ("NaN", "Infinity", "-Infinity"),
}
_KINDS: dict[str, dict[str, list[str]]] = json.loads(Path(__file__).with_suffix(".json").read_text())


def check_fields(content: Any, kind: str) -> None:
    """Raise ValueError, which names a field, unless this is an object with the fields of a kind of fields.json.

    Of a kind that fields.json lacks, it may be any object.
    """
    if (name := _find_misfit(content, _KINDS.get(kind, {}))) is not None:
        raise ValueError(f"{name} is missing, or of another type")


def _find_misfit(content: Any, fields: dict[str, list[str]]) -> str | None:
    if not isinstance(content, dict):
        return "the object"
    names = (fields.keys() | content.keys()) - {"*"} if "*" in fields else fields
    return next((n for n in names if not _fits(content.get(n, ...), fields.get(n) or fields["*"])), None)


def _fits(value: Any, kinds: list[str]) -> bool:
    return any(_CHECKS[kind](value) if kind in _CHECKS else _fits_entry(value, _KINDS[kind]) for kind in kinds)


def _fits_entry(value: Any, entry: dict[str, list[str]]) -> bool:
    if "[]" in entry:
        return isinstance(value, list) and all(_fits(each, entry["[]"]) for each in value)
    return _find_misfit(value, entry) is None
