"""A table in a CSV or .jsonl file: one row a sample, one column the target, the others inputs."""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from multigpu_cli.config.types import choice
from multigpu_cli.data.files import JsonLines, locate_other_file, locate_single_file
from multigpu_cli.data.order import split_by_sample
from multigpu_cli.data.source import FEW, DataSource, Kind
from multigpu_cli.data.tables.csv import SEPARATOR, CsvFormat, CsvTable, is_missing, read_csv, to_number
from multigpu_cli.data.tables.features import Part, TableFeatures, find_odd_cell, learn_features
from multigpu_cli.errors import RequestError, did_you_mean

_QUOTES = """quotes around yes, no, on and off, which YAML reads as True and False: --set 'data.target="no"'"""


def load(
    data_dir: str | None,
    seed: int,
    target: str | int | None = None,
    file: str | None = None,
    test_file: str | None = None,
    new: str | None = None,
    ignore: str | int | Sequence[str | int] = (),
    kind: Kind = "auto",
    separator: Annotated[str, SEPARATOR] = "auto",
    header: Annotated[str, choice("first", "none")] = "first",
    decimal: Annotated[str, choice("auto", "comma", "point")] = "auto",
) -> DataSource:
    """The rows of a file, divided by seed, 80/10/10; rows without a target are left out.

    A column is of numbers if all of its training cells that are not missing are; any other holds categories. A first
    column without a name that counts the rows, as pandas writes its index, is left out.

    Args:
        target: name of the column to predict, or its number from 0 where columns have no names.
        file: name of the file, where the folder holds several.
        test_file: another file of the same columns, in any order, whose rows take the place of the test part.
        new: another file, whose rows have no target, for predictions; its order of columns does not matter.
        ignore: columns to leave out, such as an id.
        kind: classification, regression, or auto: words, and whole numbers of at most 20 values, are classes.
        separator, header, decimal: see CsvFormat; they hold for all files.
    """
    form = CsvFormat(separator, header, decimal)
    table = read_table(
        locate_single_file("csv", data_dir, file, "a .csv file, its first row the names of the columns"), form
    )
    ignored = [str(name) for name in ([ignore] if isinstance(ignore, str | int) else ignore)]
    if "" in ignored:  # as the file calls it
        ignored = [name for name in ignored if name] + list(table.unnamed)
    target = _find_target(table, target, ignored)
    note = ""
    if table.columns[0] not in [*ignored, target] and _first_counts_rows(table):
        ignored.append(table.columns[0])
        note = "without its unnamed first column, which counts the rows: "
    chosen = [place for place, name in enumerate(table.columns) if name != target and name not in ignored]
    if not chosen:
        raise RequestError(f"--data csv: {table.path} has no column but the target, {target!r}, and ignored ones")
    table = _with_target(table, target)
    parts = [Part(table, rows.numpy()) for rows in split_by_sample(len(table.rows), (0.1, 0.1), seed)]
    if test_file:
        parts[2] = _whole(_read_test(locate_other_file("csv", Path(str(data_dir)), test_file), table, target, form))
    more = _read_new(locate_other_file("csv", Path(str(data_dir)), new), table, target, form) if new else None
    return replace(_build_source(table, target, chosen, kind, parts, more), note=note)


def _build_source(
    table: CsvTable, target: str, chosen: list[int], kind: str, parts: list[Part], new: CsvTable | None
) -> DataSource:
    """Features and targets of all parts, and of new rows without a target, by what the first part teaches."""
    columns = [table.columns[place] for place in chosen]
    features = learn_features(parts[0], columns)
    targets, names = _read_targets(parts, target, kind, table)
    others = [*parts[1:], *([_whole(new)] if new else [])]
    warnings = [*table.warnings, *_check_numbers(features, others, table.path)]
    warnings += [odd for name in [*columns, target] if (odd := find_odd_cell(parts[0], name))]
    inputs = features.transform(table)
    tests = inputs if parts[2].table is table else features.transform(parts[2].table)
    found = zip((inputs, inputs, tests), parts, targets, strict=True)
    splits = [TensorDataset(each[torch.from_numpy(part.rows)], labels) for each, part, labels in found]
    rows = list(map(repr, parts[0].table.rows))  # in the order of the file, since memory is slow in any other
    learned_from = f"({chosen}, [{', '.join([rows[row] for row in parts[0].rows.tolist()])}])"
    spread = None if names else (float(targets[0].mean()), float(targets[0].std(correction=0)) or 1.0)
    return DataSource(
        train=splits[0],
        val=splits[1],
        test=splits[2],
        new=TensorDataset(features.transform(new), targets[0].new_zeros(len(new.rows))) if new else None,
        input_shape=tuple(splits[0].tensors[0].shape[1:]),
        num_classes=len(names),
        class_names=names,
        target_scale=spread,
        transform_signature=sha256(learned_from.encode()).hexdigest(),
        codec=features,
        warnings=tuple(warnings),
        model="mlp",
        task="classification" if names else "regression",
    )


def _first_counts_rows(table: CsvTable) -> bool:
    """Whether the first column is what pandas or R writes beside a table: without a name, 0, 1, 2, … or 1, 2, 3, …."""
    if table.columns[0] not in table.unnamed or len(table.columns) < 3:
        return False
    cells = [row[0] for row in table.rows]
    return cells in [[str(first + at) for at in range(len(cells))] for first in (0, 1)]


def _find_target(table: CsvTable, target: str | int | None, ignored: list[str]) -> str:
    """The column to predict, after all that are named are found."""
    asked = [] if target is None else [("target", str(target))]
    for setting, name in [*asked, *(("ignore", name) for name in ignored)]:
        if name not in table.columns:
            remedy = _suggest_target(table) if table.warnings else did_you_mean(name, table.columns)
            remedy = _QUOTES if name in ("True", "False") else remedy
            raise RequestError(f"data.{setting}: there is no column {name!r}", remedy=remedy)
    if target is None:
        columns = ", ".join(table.columns[:10]) + (", …" if len(table.columns) > 10 else "")
        raise RequestError(f"--data csv: which column is the target? ({columns})", remedy=_suggest_target(table))
    return str(target)


def _suggest_target(table: CsvTable) -> str:
    if table.warnings:  # its first row looks like data
        return f"--set data.header=none --set data.target={len(table.columns) - 1}, if the first row is data"
    return f"--set {quote(f'data.target={table.columns[-1]}')}"


def _whole(table: CsvTable) -> Part:
    return Part(table, np.arange(len(table.rows)))


def _with_target(table: CsvTable, target: str) -> CsvTable:
    gaps = set(filter(is_missing, set(table.select(target))))
    there = [number for number, cell in enumerate(table.select(target)) if cell not in gaps]
    return replace(table, rows=[table.rows[row] for row in there], lines=[table.lines[row] for row in there])


def _read_test(path: Path, table: CsvTable, target: str, form: CsvFormat) -> CsvTable:
    """Another file of the same columns, which are brought into the table's order."""
    others = read_table(path, form)
    if sorted(others.columns) != sorted(table.columns):
        raise RequestError(
            f"data.test_file: {path.name} has other columns",
            remedy=f"{', '.join(table.columns)}; or data.new={path.name}, for rows without a target",
        )
    places = [others.columns.index(name) for name in table.columns]
    others = replace(others, columns=table.columns, rows=[[row[at] for at in places] for row in others.rows])
    if not (found := _with_target(others, target)).rows:
        raise RequestError(f"data.test_file: no row of {path} has a target", remedy=f"data.new={path.name}")
    return found


def _read_new(path: Path, table: CsvTable, target: str, form: CsvFormat) -> CsvTable:
    """Rows that may lack the target; where columns have no names, the others are in order."""
    found = read_table(path, form)
    if form.header == "none" and len(found.columns) == len(table.columns) - 1:
        return replace(found, columns=[name for name in table.columns if name != target])
    return found


def _check_numbers(features: TableFeatures, parts: Sequence[Part], path: Path) -> list[str]:
    """Warnings about cells of the same file that are no numbers; RequestError where another file has some."""
    found = {part.table.path: features.find_words(part) for part in parts if part.table.path != path}
    if wrong := [line for lines in found.values() for line in lines]:
        raise RequestError("\n".join(wrong), remedy="numbers there, or nothing")
    return [
        f"{line}; it counts as missing"
        for part in parts
        if part.table.path == path
        for line in features.find_words(part)
    ]


def _read_targets(
    parts: Sequence[Part], target: str, kind: str, table: CsvTable
) -> tuple[list[Tensor], tuple[str, ...]]:
    """Class numbers with the names of the classes, or numbers and no names."""
    cells = [np.array(part.table.select(target), dtype=object)[part.rows].tolist() for part in parts]
    here = set(table.select(target))
    learned = set(map(to_number, here))  # a test file does not decide
    whole = all(number is not None and number.is_integer() for number in learned)
    classes = None in learned or (whole and len(learned) <= FEW) if kind == "auto" else kind == "classification"
    if not classes:
        for part in parts:
            if (at := part.find_word(target)) is not None:
                word = part.table.rows[at][table.columns.index(target)]
                raise RequestError(f"data.kind: column {target!r} holds {word!r}, no number", remedy="classification")
        return [torch.from_numpy(part.table.parse(target)[0][part.rows]).float() for part in parts], ()

    def label(cell: str) -> str | float | None:
        return to_number(cell) if whole else cell  # 1 and 1.0 are one class

    known = set(map(label, here))
    _check_labels(parts[2], target, [cell for cell in dict.fromkeys(cells[2]) if label(cell) not in known], table)
    names: dict[str | float | None, str] = {}
    for cell in sorted(set().union(*cells), key=lambda cell: (float(cell) if whole else 0.0, cell)):
        names.setdefault(label(cell), cell)
    place = {each: number for number, each in enumerate(names)}
    numbers = {cell: place[label(cell)] for cell in set().union(*cells)}
    return [torch.tensor([numbers[cell] for cell in each]) for each in cells], tuple(names.values())


def _check_labels(test: Part, target: str, strange: Sequence[str], table: CsvTable) -> None:
    if strange:
        names = ", ".join(map(repr, strange[:5])) + (", …" if len(strange) > 5 else "")
        line = test.table.lines[test.table.select(target).index(strange[0])]
        raise RequestError(
            f"{test.table.path}:{line}: labels that {table.path} does not have: {names}",
            remedy=f"labels of column {target!r} that training knows, or data.kind=regression for numbers",
        )


def read_table(path: Path, format: CsvFormat) -> CsvTable:
    """A .jsonl or CSV file; see `read_csv`. A field that a record lacks, or that is null, is an empty cell."""
    if path.suffix != ".jsonl" or not path.is_file():
        return read_csv(path, format)
    records = JsonLines(path)
    found = [records[index] for index in range(len(records))]
    if not found:
        raise RequestError(f"--data csv: {path}: no rows")
    columns = list(dict.fromkeys(name for record in found for name in record))
    places = [records.describe(index) for index in range(len(found))]
    rows = [
        [_to_cell(record.get(name), name, place) for name in columns]
        for record, place in zip(found, places, strict=True)
    ]
    return CsvTable(path, columns, rows, [int(place.rpartition(":")[2]) for place in places], ())


def _to_cell(value: Any, name: str, place: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str | int | float):
        raise RequestError(
            f"--data csv: {place}: {name} is a {type(value).__name__}, not a text, a number or a boolean",
            remedy="plain values; conversations are for --data chat with --model-dir",
        )
    return str(value).strip()
