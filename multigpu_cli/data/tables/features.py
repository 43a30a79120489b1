"""From rows of text to features: what the training rows teach of scales, gaps and categories; scikit-learn does it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from multigpu_cli.data.source import FEW, Codec
from multigpu_cli.data.tables.csv import CsvTable, is_missing

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline
    from sklearn.preprocessing import OneHotEncoder

_CATEGORIES = 50  # of one column; rarer ones share a place
_MOST = 0.9  # where so many cells are numbers, the others look like mistakes
_EXAMPLES = 16
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
    """How rows of a table become samples."""

    columns: tuple[str, ...]  # names of the columns that are used, in order
    numeric: tuple[int, ...]  # which of them hold numbers, by place; the others hold categories
    scaler: "Pipeline | None"  # of numbers, fitted; None without such columns
    encoder: "OneHotEncoder | None"  # of categories, likewise
    examples: CsvTable  # the first training rows

    @property
    def _numbers(self) -> list[str]:
        return [self.columns[at] for at in self.numeric]

    @property
    def _categories(self) -> list[str]:
        return [name for at, name in enumerate(self.columns) if at not in self.numeric]

    def transform(self, table: CsvTable) -> Tensor:
        """(n, features) float32: numbers, then a mark for each gap that training knows, then one-hot categories.

        A cell that is no number in a column of numbers counts as a gap.
        """
        found = []
        if self.scaler is not None:
            found.append(self.scaler.transform(_stack_numbers(table, self._numbers, slice(None))))
        if self.encoder is not None:
            found.append(self.encoder.transform(_stack_words(table, self._categories)))
        return torch.from_numpy(np.hstack(found).astype(np.float32))

    def find_words(self, part: Part) -> list[str]:
        """The first cell of each column of numbers that holds something else, in words."""
        return [
            f"{part.table.describe_cell(name, at)} is no number, as the training rows have there"
            for name in self._numbers
            if (at := part.find_word(name)) is not None
        ]

    def describe(self) -> dict[str, Any]:
        """What was learned, as plain values, in the order of the features.

        numbers: column, median (in place of a gap), mean and scale; the feature is (value - mean) / scale.
        gaps: column, mean and scale; the same of 1 where the cell is a gap, else 0.
        categories: column, and words: for each feature the words that make it 1; other: the feature of any other
        word, or None where such a word makes none 1.
        """
        words = [self._describe_words(number, name) for number, name in enumerate(self._categories)]
        return {**self._describe_numbers(), "categories": words}

    def _describe_numbers(self) -> dict[str, list[dict[str, Any]]]:
        if self.scaler is None:
            return {"numbers": [], "gaps": []}
        names, (fill, scale) = self._numbers, self.scaler
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
        assert self.encoder is not None
        rare = self.encoder.infrequent_categories_[number]
        rare = [] if rare is None else rare.tolist()
        words = [[word] for word in self.encoder.categories_[number].tolist() if word not in rare]
        return {"column": column, "words": words + [rare] * bool(rare), "other": len(words) if rare else None}


def learn_features(train: Part, columns: Sequence[str]) -> TableFeatures:
    """Learn from the training rows.

    Missing numbers become the median, with a column of its own that says so; missing categories are one more category.
    """
    from sklearn.impute import SimpleImputer  # seconds, and not for those who bring no table
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    table, rows = train
    numeric = tuple(at for at, name in enumerate(columns) if train.find_word(name) is None)
    numbers, words = [columns[at] for at in numeric], [name for at, name in enumerate(columns) if at not in numeric]
    scaler = encoder = None
    if numbers:
        gaps = SimpleImputer(strategy="median", add_indicator=True, keep_empty_features=True)
        scaler = make_pipeline(gaps, StandardScaler()).fit(_stack_numbers(table, numbers, rows))
    if words:
        encoder = OneHotEncoder(handle_unknown="infrequent_if_exist", max_categories=_CATEGORIES, sparse_output=False)
        encoder.fit(_stack_words(table, words)[rows])
    few = rows[:_EXAMPLES].tolist()
    examples = replace(table, rows=[table.rows[row] for row in few], lines=[table.lines[row] for row in few])
    return TableFeatures(tuple(columns), numeric, scaler, encoder, examples)


def find_odd_cell(part: Part, column: str) -> str:
    """Where a column holds almost nothing but many numbers, the first cell that is none, in words; else nothing."""
    found, is_word = (each[part.rows] for each in part.table.parse(column))
    numbers, words = found[np.isfinite(found)], np.count_nonzero(is_word)
    if not words or len(numbers) < _MOST * (len(numbers) + words) or len(np.unique(numbers)) <= FEW:
        return ""
    odd = part.table.describe_cell(column, int(part.rows[is_word.argmax()]))
    return f"{odd} is no number, so the whole column counts as words"


def _stack_numbers(table: CsvTable, columns: Sequence[str], rows: np.ndarray | slice) -> np.ndarray:
    """(n, columns) float64, nan for gaps; each column in one piece, which decides the last bit of its mean."""
    return np.stack([table.parse(name)[0][rows] for name in columns]).T


def _stack_words(table: CsvTable, columns: Sequence[str]) -> np.ndarray:
    """(n, columns) words, as scikit-learn takes them."""
    return np.stack([np.array(_name_gaps(table.select(name)), dtype=object) for name in columns], axis=1)


def _name_gaps(cells: Sequence[str]) -> list[str]:
    words = {cell: GAP if is_missing(cell) else cell for cell in set(cells)}
    return [words[cell] for cell in cells]
