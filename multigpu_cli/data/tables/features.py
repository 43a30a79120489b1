"""From rows of text to features: what the training rows teach of scales, gaps and categories."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from shlex import quote
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from multigpu_cli.data.notation import MOST, has_unit, is_missing, is_number_like
from multigpu_cli.data.source import FEW, Codec
from multigpu_cli.data.tables.csv import CsvTable

_CATEGORIES = 50  # of one column; rarer ones share a place
_EXAMPLES = 16
AS_NUMBERS = "write numbers as 1234.5, dates as 2024-12-31, or --set data.decimal=comma"
GAP = "missing"  # the category of cells that hold nothing


class Part(NamedTuple):
    """Some rows of a table, by their places (n,) int64: its columns are looked at once, in the order of the file."""

    table: CsvTable
    rows: np.ndarray

    def find_word(self, column: str) -> int | None:
        """The place in the table of the first cell that is neither a number nor a gap."""
        words = self.rows[self.table.parse(column)[1][self.rows]]
        return int(words[0]) if len(words) else None


@dataclass(frozen=True)
class TableFeatures(Codec):
    """How rows of a table become samples.

    Attributes:
        columns: names of the columns that are used, in order.
        learned: what the training rows taught, as plain values, in the order of the features.
            numbers: column, median (in place of a gap), mean and scale; the feature is (value - mean) / scale.
            gaps: column, mean and scale; the same of 1 where the cell is a gap, else 0.
            categories: column, and words: for each feature the words that make it 1; other: the feature of any other
            word, or None where such a word makes none 1.
        examples: the first training rows.
    """

    columns: tuple[str, ...]
    learned: Mapping[str, Sequence[Mapping[str, Any]]]
    examples: CsvTable

    @property
    def numbers(self) -> list[str]:
        """The columns that hold numbers, in order; the others hold categories."""
        return [each["column"] for each in self.learned["numbers"]]

    def transform(self, table: CsvTable) -> Tensor:
        """(n, features) float32: numbers, then a mark for each gap that training knows, then one-hot categories.

        A cell that is no number in a column of numbers counts as a gap.
        """
        found = [_encode_words(column, table.select(column["column"])) for column in self.learned["categories"]]
        if self.numbers:
            found.insert(0, self._scale_numbers(table))
        return torch.from_numpy(np.hstack(found))

    def _scale_numbers(self, table: CsvTable) -> np.ndarray:
        """(n, numbers + gaps) float32, computed in float64."""
        numbers, gaps = self.learned["numbers"], self.learned["gaps"]
        values = np.stack([table.parse(name)[0] for name in self.numbers], axis=1)
        missing = np.isnan(values)
        filled = np.where(missing, [each["median"] for each in numbers], values)
        marks = missing[:, [self.numbers.index(each["column"]) for each in gaps]]
        means, scales = ([each[name] for each in (*numbers, *gaps)] for name in ("mean", "scale"))
        return np.asarray((np.hstack([filled, marks]) - means) / scales, dtype=np.float32)


def learn_features(train: Part, columns: Sequence[str]) -> TableFeatures:
    """Learn from the training rows, to the bit as scikit-learn's transformers, whose import takes seconds on each rank.

    Missing numbers become the median, with a column of its own that says so; missing categories are one more category.
    """
    table, rows = train
    learned: dict[str, list[dict[str, Any]]] = {"numbers": [], "gaps": [], "categories": []}
    for name in columns:
        if train.find_word(name) is not None:
            learned["categories"].append({"column": name, **_learn_words(train, name)})
            continue
        values = table.parse(name)[0][rows]
        missing = np.isnan(values)
        median = 0.0 if missing.all() else float(np.median(values[~missing]))
        filled = np.where(missing, median, values)
        learned["numbers"].append({"column": name, "median": median, **_learn_scale(filled)})
        if missing.any():
            learned["gaps"].append({"column": name, **_learn_scale(missing.astype(np.float64))})
    few = rows[:_EXAMPLES].tolist()
    examples = replace(table, rows=[table.rows[row] for row in few], lines=[table.lines[row] for row in few])
    return TableFeatures(tuple(columns), learned, examples)


def _learn_scale(values: np.ndarray) -> dict[str, float]:
    """Mean and standard deviation (n,) by the corrected two-pass algorithm (Chan, Golub and LeVeque 1983).

    The scale is 1 where the variance is within the error of a constant's.
    """
    count, epsilon = len(values), np.finfo(np.float64).eps
    mean = values.sum() / count
    apart = values - mean
    variance = ((apart**2).sum() - apart.sum() ** 2 / count) / count
    constant = variance <= count * epsilon * variance + (count * mean * epsilon) ** 2
    return {"mean": float(mean), "scale": 1.0 if constant else float(np.sqrt(variance))}


def _learn_words(train: Part, column: str) -> dict[str, Any]:
    """A feature for each word, of which the rarest share one."""
    cells = _name_gaps(train.table.select(column))
    counts = Counter(cells[row] for row in train.rows.tolist())
    words = sorted(counts)
    rare = set(sorted(words, key=counts.__getitem__)[: 1 - _CATEGORIES]) if len(words) >= _CATEGORIES else set()
    frequent = [[word] for word in words if word not in rare]
    return {"words": frequent + [sorted(rare)] * bool(rare), "other": len(frequent) if rare else None}


def _encode_words(column: Mapping[str, Any], cells: Sequence[str]) -> np.ndarray:
    """(n, features) float32 of one column of categories."""
    places = {word: place for place, words in enumerate(column["words"]) for word in words}
    count = len(column["words"])
    other = count if column["other"] is None else column["other"]
    rows = np.eye(count + 1, count, dtype=np.float32)  # the last is that of an unknown word
    return rows[[places.get(cell, other) for cell in _name_gaps(cells)]]


def describe_words(part: Part, column: str) -> str:
    """Return a warning about a column of words that looks like a mistake, or nothing.

    Most cells are numbers, with a unit or without, dates or the like, many and different; or almost every row has a
    text of its own.
    """
    is_word = part.table.parse(column)[1][part.rows]
    if not is_word.any():
        return ""
    counts = Counter(map(part.table.select(column).__getitem__, part.rows.tolist()))
    counts = Counter({cell: count for cell, count in counts.items() if not is_missing(cell)})
    if len(counts) <= FEW:
        return ""
    if 2 * sum(counts[cell] for cell in counts if is_number_like(cell) or has_unit(cell)) > counts.total():
        odd = part.table.describe_cell(column, int(part.rows[is_word].min()))
        return f"{odd} is not a number, so the whole column is read as words; {AS_NUMBERS}"
    way = f"teach nothing of other rows; --set {quote(f'data.ignore=[{column}]')}"
    what = f"{part.table.path}: column {column!r}: {len(counts):,} different texts in {len(part.rows):,} training rows"
    return f"{what} {way}" if len(counts) >= MOST * counts.total() else ""


def describe_unknown_words(features: TableFeatures, part: Part) -> list[str]:
    """Return a warning for each column of categories in which some rows have words that no training row has."""
    warnings = []
    for column in features.learned["categories"]:
        known = {word for words in column["words"] for word in words}
        cells = _name_gaps(part.table.select(column["column"]))
        if rows := [row for row in part.rows.tolist() if cells[row] not in known]:
            cell = part.table.describe_cell(column["column"], rows[0])
            effect = "counts as no known word" if column["other"] is None else "counts as a rare word"
            warnings.append(
                f"{cell} is in no training row and {effect}; so in {len(rows):,} of {len(part.rows):,} rows"
            )
    return warnings


def _name_gaps(cells: Sequence[str]) -> list[str]:
    words = {cell: GAP if is_missing(cell) else cell for cell in set(cells)}
    return [words[cell] for cell in cells]
