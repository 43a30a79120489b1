"""A table in a CSV file: one row a sample, one column the target, the others inputs.

scikit-learn learns from the training rows alone how to scale numbers, fill gaps and spread categories out.
"""

import csv
import math
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import TensorDataset

from multigpu_cli.data.data_source import DataSource
from multigpu_cli.data.locate_dataset_files import locate_single_file
from multigpu_cli.data.split import split_by_sample
from multigpu_cli.errors import RequestError, did_you_mean

_MISSING = {"", "na", "n/a", "nan", "null", "none", "?", "-"}
_FEW = 20  # whole numbers with at most so many values are classes
_CATEGORIES = 50  # of one column; rarer ones share a place


class CsvTable(NamedTuple):
    """A file as text.

    Attributes:
        columns: names in order.
        rows: one list of cells each.
        numbers: which line of the file each row is, for messages.
    """

    columns: list[str]
    rows: list[list[str]]
    numbers: list[int]


def load(
    data_dir: str | None,
    seed: int,
    target: str | None = None,
    file: str | None = None,
    test_file: str | None = None,
    new: str | None = None,
    ignore: Sequence[str] = (),
    kind: str = "auto",
) -> DataSource:
    """The rows of a file, divided by seed, 80/10/10; rows without a target are left out.

    A column is of numbers if all of its training cells that are not missing are; any other holds categories. Missing
    numbers become the median, with a column of its own that says so; missing categories are one more category.

    Args:
        target: name of the column to predict.
        file: name of the file, where the folder holds several.
        test_file: another file of the same columns, whose rows take the place of the test part.
        new: another file, whose rows have no target, for predictions; its order of columns does not matter.
        ignore: columns to leave out, such as an id.
        kind: classification, regression, or auto: words, and whole numbers of at most 20 values, are classes.

    Raises:
        RequestError: no such file or column, rows of another length, or a kind of target that it is not.
    """
    if kind not in ("auto", "classification", "regression"):
        raise RequestError(f"data.args.kind: {kind!r}", remedy="auto, classification or regression")
    table = _table(locate_single_file("csv", ".csv", data_dir, file, "a folder with a CSV file"))
    ignored = [ignore] if isinstance(ignore, str) else list(ignore)
    target = _target(table, target, ignored)
    others = _read_matching(Path(data_dir or ".").expanduser() / test_file, table) if test_file else None
    at = table.columns.index(target)
    chosen = [place for place, name in enumerate(table.columns) if name != target and name not in ignored]
    parts = [[table.rows[i] for i in part.tolist()] for part in _split_rows(table, at, seed)]
    if others:
        parts[2] = [row for row in others.rows if not _missing(row[at])]
    cells = [[[row[place] for place in chosen] for row in part] for part in parts]
    if new:
        cells.append(_rows(Path(data_dir or ".").expanduser() / new, [table.columns[place] for place in chosen]))
    inputs = _inputs(cells)
    targets, names = _targets([[row[at] for row in part] for part in parts], target, kind)
    splits = [TensorDataset(*pair) for pair in zip(inputs[:3], targets, strict=True)]
    spread = None if names else (float(targets[0].mean()), float(targets[0].std(correction=0)) or 1.0)
    return DataSource(
        train=splits[0],
        val=splits[1],
        test=splits[2],
        new=TensorDataset(inputs[3], targets[0].new_zeros(len(inputs[3]))) if new else None,
        input_shape=tuple(inputs[0].shape[1:]),
        num_classes=len(names),
        class_names=names,
        target_scale=spread,
        transform_signature=sha256(repr((chosen, parts[0])).encode()).hexdigest(),
        model="mlp",
        task="classification" if names else "regression",
    )


def _table(path: Path) -> CsvTable:
    """Read a file whose first line names the columns; separated by comma, semicolon or tab."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            head = file.readline()
            separator = max(",;\t", key=head.count)
            columns = [name.strip() for name in next(csv.reader([head], delimiter=separator), [])]
            read = csv.reader(file, delimiter=separator)
            rows, numbers = [], []
            for row in read:
                if row:
                    rows.append([cell.strip() for cell in row])
                    numbers.append(read.line_num + 1)
    except FileNotFoundError as missing:
        there = sorted(each.name for each in path.parent.glob("*.csv"))
        raise RequestError(f"{path}: there is no such file", remedy=did_you_mean(path.name, there)) from missing
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RequestError(f"--data csv: {path}: {error}", remedy="a CSV file in UTF-8") from error
    for row, number in zip(rows, numbers, strict=True):
        if len(row) != len(columns):
            raise RequestError(
                f"--data csv: {path}:{number}: {len(row)} cells for {len(columns)} columns",
                remedy="the same number in every line; quote cells that contain the separator",
            )
    if len(set(columns)) < len(columns) or not rows:
        raise RequestError(f"--data csv: {path}: {'no rows' if not rows else 'two columns have one name'}")
    return CsvTable(columns, rows, numbers)


def _target(table: CsvTable, target: str | None, ignored: list[str]) -> str:
    """The column to predict, after all that are named are found."""
    for name in [*([] if target is None else [target]), *ignored]:
        if name not in table.columns:
            raise RequestError(f"data.args: there is no column {name!r}", remedy=did_you_mean(name, table.columns))
    if target is None:
        raise RequestError("--data csv: which column is the target?", remedy=f"--set data.target={table.columns[-1]}")
    return target


def _read_matching(path: Path, table: CsvTable) -> CsvTable:
    """Another file of the same columns."""
    others = _table(path)
    if others.columns != table.columns:
        raise RequestError(
            f"data.args.test_file: {path.name} has other columns",
            remedy=f"{', '.join(table.columns)}; or data.args.new={path.name}, for rows without a target",
        )
    return others


def _rows(path: Path, columns: Sequence[str]) -> list[list[str]]:
    """These columns of all rows of a file.

    Raises:
        RequestError: it has no such column.
    """
    table = _table(path)
    for name in columns:
        if name not in table.columns:
            raise RequestError(f"{path}: there is no column {name!r}", remedy=did_you_mean(name, table.columns))
    places = [table.columns.index(name) for name in columns]
    return [[row[place] for place in places] for row in table.rows]


def _split_rows(table: CsvTable, target: int, seed: int) -> list[torch.Tensor]:
    there = torch.tensor([at for at, row in enumerate(table.rows) if not _missing(row[target])], dtype=torch.int64)
    return [there[part] for part in split_by_sample(len(there), (0.1, 0.1), seed)]


def _inputs(parts: list[list[list[str]]]) -> list[torch.Tensor]:
    """(n, features) float32 for each part; everything that has to be learned is learned from the first."""
    from sklearn.compose import make_column_transformer  # seconds, and not for those who bring no table
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    columns = range(len(parts[0][0]))
    numeric = [at for at in columns if all(_missing(row[at]) or _number(row[at]) is not None for row in parts[0])]
    tables = []
    for part in parts:
        cells = np.empty((len(part), len(columns)), dtype=object)
        for at in columns:
            if at in numeric:
                cells[:, at] = [math.nan if (value := _number(row[at])) is None else value for row in part]
            else:
                cells[:, at] = ["missing" if _missing(row[at]) else row[at] for row in part]
        tables.append(cells)
    names = [at for at in columns if at not in numeric]
    gaps = SimpleImputer(strategy="median", add_indicator=True, keep_empty_features=True)
    spread_out = OneHotEncoder(handle_unknown="infrequent_if_exist", max_categories=_CATEGORIES, sparse_output=False)
    learned = make_column_transformer((make_pipeline(gaps, StandardScaler()), numeric), (spread_out, names))
    learned.fit(tables[0])
    return [torch.from_numpy(np.asarray(learned.transform(table), dtype=np.float32)) for table in tables]


def _targets(parts: list[list[str]], name: str, kind: str) -> tuple[list[torch.Tensor], tuple[str, ...]]:
    """Class numbers with the names of the classes, or numbers and no names."""
    values = [cell for part in parts for cell in part]
    numbers = [_number(cell) for cell in values]
    whole = all(number is not None and number.is_integer() for number in numbers)
    if kind == "auto":
        classes = None in numbers or (whole and len(set(numbers)) <= _FEW)
    else:
        classes = kind == "classification"
    if not classes:
        if None in numbers:
            word = values[numbers.index(None)]
            raise RequestError(f"data.args.kind: column {name!r} holds {word!r}, no number", remedy="classification")
        return [torch.tensor([float(cell) for cell in part]) for part in parts], ()
    known = sorted(set(values), key=float) if whole else sorted(set(values))
    place = {word: number for number, word in enumerate(known)}
    return [torch.tensor([place[cell] for cell in part]) for part in parts], tuple(known)


def _missing(cell: str) -> bool:
    return cell.lower() in _MISSING


def _number(cell: str) -> float | None:
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
