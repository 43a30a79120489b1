"""From rows of text to features: what the training rows teach of scales, gaps and categories; scikit-learn does it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from multigpu_cli.data.source import FEW, Codec
from multigpu_cli.data.tables.csv import CsvTable, is_missing
from multigpu_cli.errors import RequestError, did_you_mean

if TYPE_CHECKING:
    from sklearn.compose import ColumnTransformer

_CATEGORIES = 50  # of one column; rarer ones share a place
_MOST = 0.9  # where so many cells are numbers, the others look like mistakes
_EXAMPLES = 16
GAP = "missing"  # the category of cells that hold nothing


@dataclass(frozen=True)
class TableFeatures(Codec):
    """How rows of a table become samples.

    Attributes:
        columns: names of the columns that are used, in order.
        numeric: which of them hold numbers, by place; the others hold categories.
        learned: scikit-learn's transformers, fitted.
        examples: the first training rows.
    """

    columns: tuple[str, ...]
    numeric: tuple[int, ...]
    learned: "ColumnTransformer"
    examples: CsvTable

    def transform(self, table: CsvTable) -> Tensor:
        """(n, features) float32: numbers, then a mark for each gap that training knows, then one-hot categories.

        A cell that is no number in a column of numbers counts as a gap.

        Raises:
            RequestError: the table lacks a column.
        """
        cells = _parse_cells(_select_cells(table, self.columns), self.numeric)
        return torch.from_numpy(np.asarray(self.learned.transform(cells), dtype=np.float32))

    def find_words(self, table: CsvTable) -> list[str]:
        """The first cell of each column of numbers that holds something else, in words."""
        cells, found = _select_cells(table, self.columns), []
        for at in self.numeric:
            for row, line in zip(cells, table.lines, strict=True):
                if not is_missing(row[at]) and to_number(row[at]) is None:
                    where = f"{table.path}:{line}: {row[at]!r} in column {self.columns[at]!r}"
                    found.append(f"{where} is no number, as the training rows have there")
                    break
        return found

    def describe(self) -> dict[str, Any]:
        """What was learned, as plain values, in the order of the features.

        numbers: column, median (in place of a gap), mean and scale; the feature is (value - mean) / scale.
        gaps: column, mean and scale; the same of 1 where the cell is a gap, else 0.
        categories: column, and words: for each feature the words that make it 1; other: the feature of any other
        word, or None where such a word makes none 1.
        """
        places = [at for at in range(len(self.columns)) if at not in self.numeric]
        words = [self._describe_words(number, self.columns[at]) for number, at in enumerate(places)]
        return {**self._describe_numbers(), "categories": words}

    def _describe_numbers(self) -> dict[str, list[dict[str, Any]]]:
        if not self.numeric:
            return {"numbers": [], "gaps": []}
        names = [self.columns[at] for at in self.numeric]
        fill, scale = self.learned.named_transformers_["pipeline"]
        spread = [
            {"mean": mean, "scale": by} for mean, by in zip(scale.mean_.tolist(), scale.scale_.tolist(), strict=True)
        ]
        medians = fill.statistics_.tolist()
        numbers = zip(names, medians, spread, strict=False)
        gaps = zip(fill.indicator_.features_.tolist(), spread[len(names) :], strict=True)
        return {
            "numbers": [{"column": name, "median": median, **each} for name, median, each in numbers],
            "gaps": [{"column": names[at], **each} for at, each in gaps],
        }

    def _describe_words(self, number: int, column: str) -> dict[str, Any]:
        encoder = self.learned.named_transformers_["onehotencoder"]
        rare = encoder.infrequent_categories_[number]
        rare = [] if rare is None else rare.tolist()
        words = [[word] for word in encoder.categories_[number].tolist() if word not in rare]
        return {"column": column, "words": words + [rare] * bool(rare), "other": len(words) if rare else None}


def learn_features(train: CsvTable, columns: Sequence[str]) -> TableFeatures:
    """Learn from the training rows.

    Missing numbers become the median, with a column of its own that says so; missing categories are one more category.
    """
    from sklearn.compose import make_column_transformer  # seconds, and not for those who bring no table
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    cells, places = _select_cells(train, columns), range(len(columns))
    numeric = [at for at in places if all(is_missing(row[at]) or to_number(row[at]) is not None for row in cells)]
    gaps = SimpleImputer(strategy="median", add_indicator=True, keep_empty_features=True)
    spread_out = OneHotEncoder(handle_unknown="infrequent_if_exist", max_categories=_CATEGORIES, sparse_output=False)
    learned = make_column_transformer(
        (make_pipeline(gaps, StandardScaler()), numeric), (spread_out, [at for at in places if at not in numeric])
    )
    learned.fit(_parse_cells(cells, numeric))
    examples = train._replace(rows=train.rows[:_EXAMPLES], lines=train.lines[:_EXAMPLES])
    return TableFeatures(tuple(columns), tuple(numeric), learned, examples)


def find_odd_cell(table: CsvTable, column: str) -> str:
    """Where a column holds almost nothing but many numbers, the first cell that is none, in words; else nothing."""
    at = table.columns.index(column)
    there = [(row[at], line) for row, line in zip(table.rows, table.lines, strict=True) if not is_missing(row[at])]
    numbers = [value for cell, _ in there if (value := to_number(cell)) is not None]
    if len(numbers) == len(there) or len(numbers) < _MOST * len(there) or len(set(numbers)) <= FEW:
        return ""
    odd, line = next((cell, line) for cell, line in there if to_number(cell) is None)
    return f"{table.path}:{line}: {odd!r} in column {column!r} is no number, so the whole column counts as words"


def to_number(cell: str) -> float | None:
    """A finite number, or None."""
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _select_cells(table: CsvTable, columns: Sequence[str]) -> list[list[str]]:
    for name in columns:
        if name not in table.columns:
            raise RequestError(f"{table.path}: there is no column {name!r}", remedy=did_you_mean(name, table.columns))
    places = [table.columns.index(name) for name in columns]
    return [[row[place] for place in places] for row in table.rows]


def _parse_cells(rows: Sequence[Sequence[str]], numeric: Sequence[int]) -> np.ndarray:
    """Numbers, nan for gaps, and words, as scikit-learn takes them."""
    cells = np.empty((len(rows), len(rows[0])), dtype=object)
    for at in range(cells.shape[1]):
        if at in numeric:
            cells[:, at] = [math.nan if (value := to_number(row[at])) is None else value for row in rows]
        else:
            cells[:, at] = [GAP if is_missing(row[at]) else row[at] for row in rows]
    return cells
