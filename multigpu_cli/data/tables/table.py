"""A table in a CSV or .jsonl file: one row a sample, one column the target, the others inputs."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import compress, islice
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from multigpu_cli.config.paths import IMAGES
from multigpu_cli.config.types import choice
from multigpu_cli.config.yaml_text import UnreadableError, compose, parse_typed
from multigpu_cli.data.files import JsonLines, locate_other_file, locate_single_file
from multigpu_cli.data.notation import PLAIN, describe_numbers_as_classes, is_missing
from multigpu_cli.data.order import split_by_sample
from multigpu_cli.data.source import FEW, SPLITS, DataSource, Kind, check_precision
from multigpu_cli.data.tables.csv import SEPARATOR, CsvFormat, CsvTable, read_csv, read_decimal_commas
from multigpu_cli.data.tables.features import (
    AS_NUMBERS,
    Part,
    TableFeatures,
    describe_unknown_words,
    describe_words,
    learn_features,
)
from multigpu_cli.errors import RequestError, did_you_mean

_WHOLE = re.compile(r"(0|-?[1-9][0-9]*)(\.0*)?")  # 1 and 1.0 are one class, if all labels are such
_NAMES = 20  # different cells of a column that are looked up as names of files
_MEDIA = (*IMAGES, ".wav", ".mp3", ".flac", ".ogg", ".m4a", ".mp4", ".avi")
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
        kind: classification, regression, or auto: words, and plain whole numbers of at most 20 values, are
            classes; money, per cent, 1,000 and dates are numbers.
        separator, header, decimal: see CsvFormat; they hold for all files.
    """
    form = CsvFormat(separator, header, decimal)
    table = read_table(
        locate_single_file("csv", data_dir, file, "a .csv file, its first row the names of the columns"), form
    )
    read_decimal_commas(table, {})
    ignored = [_name_column(table, name) for name in ([ignore] if isinstance(ignore, str | int) else ignore)]
    if "" in ignored:  # as the file calls it
        ignored = [name for name in ignored if name] + list(table.unnamed)
    target = _find_target(table, target, ignored)
    notes = []
    if table.columns[0] not in [*ignored, target] and _first_counts_rows(table):
        ignored.append(table.columns[0])
        notes.append("without its unnamed first column, which counts the rows")
    columns = [name for name in table.columns if name != target and name not in ignored]
    if not columns:
        raise RequestError(f"--data csv: {table.path} has no column but the target, {target!r}, and ignored ones")
    table = _drop_unlabeled(table, table, target, kind, notes)
    for name in [target, *columns]:
        _refuse_file_names(table, name)  # parses the column: other files are read in its notation
    parts = [Part(table, rows.numpy()) for rows in split_by_sample(len(table.rows), (0.1, 0.1), seed)]
    if test_file:
        tests = _read_test(locate_other_file("csv", Path(str(data_dir)), test_file), table, form)
        parts[2] = _whole(_drop_unlabeled(tests, table, target, kind, notes))
    more = _read_new(locate_other_file("csv", Path(str(data_dir)), new), table, target, form) if new else None
    source = _build_source(table, target, columns, kind, parts, more)
    notes += _count_missing(table, columns)
    return replace(source, note="; ".join(notes) + ": " * bool(notes))


def _build_source(
    table: CsvTable, target: str, columns: list[str], kind: str, parts: list[Part], new: CsvTable | None
) -> DataSource:
    """Features and targets of all parts, and of new rows without a target, by what the first part teaches."""
    features = learn_features(parts[0], columns)
    targets, names = _read_targets(parts, target, kind, table)
    others = [*parts[1:], *([_whole(new)] if new else [])]
    warnings = [*table.warnings, *_check_numbers(features, others, table.path)]
    warnings += _warn_of_words(parts[0], columns, target if kind == "auto" else None, is_classified=bool(names))
    files = [part for part in others if part.table is not table]
    warnings += [warning for part in files for warning in describe_unknown_words(features, part)]
    doubts = (each.table.doubts.get(name) for each in [parts[0], *others] for name in [*columns, target])
    warnings += dict.fromkeys(filter(None, doubts))
    inputs = features.transform(table)
    tests = inputs if parts[2].table is table else features.transform(parts[2].table)
    splits: dict[str, Any] = {
        split: TensorDataset(values[torch.from_numpy(part.rows)], labels)
        for split, values, part, labels in zip(SPLITS, (inputs, inputs, tests), parts, targets, strict=True)
    }
    rows = list(map(repr, parts[0].table.rows))  # in the order of the file, since memory is slow in any other
    indices = list(map(table.columns.index, columns))
    learned_from = f"({indices}, [{', '.join([rows[row] for row in parts[0].rows.tolist()])}])"
    # how cells are read that version 0.2 read otherwise; the features of all others are as they were
    notations = [(name, way) for name in features.numbers if (way := table.notations[name]) != PLAIN]
    learned_from += repr(notations) if notations else ""
    spread = None if names else (float(targets[0].mean()), float(targets[0].std(correction=0)) or 1.0)
    return DataSource(
        **splits,
        new=TensorDataset(features.transform(new), targets[0].new_zeros(len(new.rows))) if new else None,
        input_shape=tuple(inputs.shape[1:]),
        num_classes=len(names),
        class_names=names,
        target_scale=spread,
        transform_signature=sha256(learned_from.encode()).hexdigest(),
        codec=features,
        warnings=tuple(warnings),
        model="mlp",
        task="classification" if names else "regression",
    )


def _warn_of_words(part: Part, columns: Sequence[str], target: str | None, *, is_classified: bool) -> list[str]:
    """Return warnings about columns of words that look like mistakes; the target is None if data.kind is set."""
    named = [*columns, *([] if target is None else [target])]
    words = {name: warning for name in named if (warning := describe_words(part, name))}
    if is_classified and target is not None and target not in words:
        counts, label = part.table.count_cells(target), f"{part.table.path}: column {target!r}"
        words[target] = describe_numbers_as_classes(label, counts, counts.total())
    return list(filter(None, words.values()))


def _first_counts_rows(table: CsvTable) -> bool:
    """Whether the first column is what pandas or R writes beside a table: without a name, 0, 1, 2, … or 1, 2, 3, …."""
    if table.columns[0] not in table.unnamed or len(table.columns) < 3:
        return False
    cells = [row[0] for row in table.rows]
    return cells in [[str(first + at) for at in range(len(cells))] for first in (0, 1)]


def _find_target(table: CsvTable, target: str | int | None, ignored: list[str]) -> str:
    """The column to predict, after all that are named are found."""
    asked = [] if target is None else [("target", _name_column(table, target))]
    for setting, name in [*asked, *(("ignore", name) for name in ignored)]:
        if name not in table.columns:
            remedy = _suggest_target(table) if table.warnings else did_you_mean(name, table.columns)
            remedy = _QUOTES if name in ("True", "False") else remedy
            if setting == "target":
                remedy += "; rows without a target, for predict: the training data, and --set data.new=FILE"
            raise RequestError(f"data.{setting}: there is no column {name!r}", remedy=remedy)
    if target is None:
        columns = ", ".join(table.columns[:10]) + (", …" if len(table.columns) > 10 else "")
        raise RequestError(f"--data csv: which column is the target? ({columns})", remedy=_suggest_target(table))
    return asked[0][1]


def _name_column(table: CsvTable, name: str | int) -> str:
    """Return the column that a setting names; YAML reads some names, such as 007 and 1_1, as numbers.

    RequestError: several columns are read as the same number.
    """
    alike = [column for column in table.columns if not isinstance(name, str) and _read_as_number(column) == name]
    if len(alike) > 1:
        raise RequestError(
            f"--data csv: {name} may be column {' or '.join(map(repr, alike))}, which YAML reads as the same number",
            remedy=f"""put it in quotes: --set 'data.target="{alike[0]}"'""",
        )
    return alike[0] if alike else str(name)


def _read_as_number(name: str) -> int | float | None:
    try:
        number = parse_typed(compose(name))  # type: ignore[arg-type]
    except (UnreadableError, AttributeError):  # no YAML; or nothing
        return None
    return number if type(number) in (int, float) else None


def _suggest_target(table: CsvTable) -> str:
    if table.warnings:  # its first row looks like data
        return f"--set data.header=none --set data.target={len(table.columns) - 1}, if the first row is data"
    return f"--set {quote(f'data.target={table.columns[-1]}')}"


def _whole(table: CsvTable) -> Part:
    return Part(table, np.arange(len(table.rows)))


def _drop_unlabeled(table: CsvTable, train: CsvTable, target: str, kind: str, notes: list[str]) -> CsvTable:
    """Leave out rows without a target, count them in `notes`, and note in `doubts` what words such as NA count as.

    They are classes among words, or if data.kind asks for classes; among the training table's numbers they say that
    there is no target. RequestError: no row has a target.
    """
    numbers, is_word = train.parse(target)
    is_label = kind == "classification" or (kind == "auto" and (is_word.any() or not np.isfinite(numbers).any()))
    cells = table.select(target)
    words = {cell: count for cell, count in Counter(cells).items() if cell and is_missing(cell)}
    gaps = {"", *(() if is_label else words)}
    rows = [row for row, cell in enumerate(cells) if cell not in gaps]
    if not rows:
        flag = "--data csv" if table is train else "data.test_file"
        raise RequestError(f"{flag}: no row of {table.path} has a target", remedy=f"data.new={table.path.name}")
    if left_out := len(cells) - len(rows):
        notes.append(f"without {left_out:,} of {len(cells):,} rows of {table.path.name}, which have no target")
    if words:
        label = "is a class; leave the cell empty in rows without a target"
        gap = "is no target, as the others are numbers; --set data.kind=classification makes it a class"
        listed = ", ".join(f"{cell!r} ({count:,} rows)" for cell, count in words.items())
        table.doubts[target] = f"{table.path}: column {target!r}: {listed} {label if is_label else gap}"
    kept = replace(table, rows=[table.rows[row] for row in rows], lines=[table.lines[row] for row in rows])
    return kept if left_out else table  # which has parsed the column already


def _count_missing(table: CsvTable, columns: Sequence[str]) -> list[str]:
    """Return a note on words such as NA in some columns."""
    words = []
    for name in columns:
        numbers, is_word = table.parse(name)
        if (is_gap := np.isnan(numbers) & ~is_word).any():
            gaps = Counter(compress(table.select(name), is_gap))
            words += [f"{cell!r} in {name} ({count:,})" for cell, count in gaps.items() if cell]
    return [f"read as missing: {', '.join(words[:5])}{', …' * (len(words) > 5)}"] if words else []


def _refuse_file_names(table: CsvTable, column: str) -> None:
    """Raise RequestError if most words of a column name files in the table's folder, or images or sounds anywhere.

    Few words are looked at, spread over the column, because a network disk takes a moment for each.
    """
    counts = table.count_cells(column) if table.parse(column)[1].any() else {}
    cells = list(islice(counts, 0, None, 1 + len(counts) // _NAMES))
    names = [cell for cell in cells if _is_file_name(table.path.parent, cell)]
    if 2 * len(names) > len(cells):
        raise RequestError(
            f"--data csv: column {column!r} of {table.path} names files ({names[0]}), whose content is not read",
            remedy="write a Dataset that opens them: --data module:factory, or leave the column "
            f"out: --set {quote(f'data.ignore=[{column}]')}",
        )


def _is_file_name(folder: Path, cell: str) -> bool:
    path = folder / cell.replace("\\", "/")  # Windows separates folders by backslashes
    return "." in cell and len(cell) < 256 and (path.suffix.lower() in _MEDIA or path.is_file())


def _read_test(path: Path, table: CsvTable, form: CsvFormat) -> CsvTable:
    """Return another file of the same columns, in the table's order."""
    others = read_table(path, form)
    if sorted(others.columns) != sorted(table.columns):
        remedy = f"{', '.join(table.columns)}; or data.new={path.name}, for rows without a target"
        raise RequestError(f"data.test_file: {path.name} has other columns", remedy=remedy)
    places = [others.columns.index(name) for name in table.columns]
    rows = [[row[at] for at in places] for row in others.rows]
    return _read_alike(replace(others, columns=table.columns, rows=rows), table)


def _read_new(path: Path, table: CsvTable, target: str, form: CsvFormat) -> CsvTable:
    """Return rows that may lack the target; if columns have no names, the others are in order."""
    found = read_table(path, form)
    if form.header == "none" and len(found.columns) == len(table.columns) - 1:
        found = replace(found, columns=[name for name in table.columns if name != target])
    return _read_alike(found, table)


def _read_alike(others: CsvTable, table: CsvTable) -> CsvTable:
    """Return another file's table, whose cells are read as those of the training table."""
    read_decimal_commas(others, table.notations)
    return replace(others, notations=table.notations)


def _check_numbers(features: TableFeatures, parts: Sequence[Part], path: Path) -> list[str]:
    """Return warnings about words of the same file among numbers; raise RequestError if another file has some."""
    words = [
        (part.table.path, _describe_word(part, name, row, features.examples))
        for part in parts
        for name in features.numbers
        if (row := part.find_word(name)) is not None
    ]
    if wrong := dict.fromkeys(line for file, line in words if file != path):
        raise RequestError("\n".join(wrong), remedy="numbers there, or nothing")
    return [f"{line}; it counts as missing" for _, line in words]


def _describe_word(part: Part, column: str, row: int, train: CsvTable) -> str:
    """Describe a cell that is not a number, with the first number of the training rows, if these have one."""
    is_number = np.isfinite(train.parse(column)[0])
    example = f", such as {train.select(column)[int(is_number.argmax())]!r}" if is_number.any() else ""
    return f"{part.table.describe_cell(column, row)} is not a number, as in the training rows{example}"


def _read_targets(
    parts: Sequence[Part], target: str, kind: str, table: CsvTable
) -> tuple[list[Tensor], tuple[str, ...]]:
    """Class numbers with the names of the classes, or numbers and no names."""
    cells = [np.array(part.table.select(target), dtype=object)[part.rows].tolist() for part in parts]
    counts = Counter(table.select(target))  # a test file does not decide
    notation = table.notations[target]
    values = {cell: notation.read(cell) for cell in set().union(counts, *cells)}
    numbers = {values[cell] for cell in counts}
    is_whole = all(number is not None and number.is_integer() for number in numbers)
    is_merged = all(map(_WHOLE.fullmatch, counts))
    labels = {cell: match[1] if is_merged and (match := _WHOLE.fullmatch(cell)) else cell for cell in values}
    known = {labels[cell] for cell in counts}  # not numbers: floats are the same for many long ones
    few = len(known) <= FEW and is_whole and not notation.is_amount
    classes = None in numbers or few if kind == "auto" else kind == "classification"
    if not classes:
        for part in parts:
            if (at := part.find_word(target)) is not None:
                way = (
                    "numbers there, or data.kind=classification" if part.table is table else "numbers there, or nothing"
                )
                raise RequestError(f"data.target: {_describe_word(part, target, at, table)}", remedy=way)
        numbers_of = [part.table.parse(target)[0][part.rows] for part in parts]
        check_precision(numbers_of[0], f"{table.path}: column {target!r}")
        return [torch.from_numpy(each).float() for each in numbers_of], ()
    if kind == "auto" and None in numbers and len(counts) > max(FEW, counts.total() / 2):
        odd = table.describe_cell(target, int(table.parse(target)[1].argmax()))
        raise RequestError(
            f"data.target: {odd} is not a number, and {len(counts):,} texts in {counts.total():,} rows are no classes",
            remedy=f"{AS_NUMBERS}; or --set data.kind=classification",
        )
    if strange := [cell for cell in dict.fromkeys(cells[2]) if labels[cell] not in known]:
        test, listed = parts[2].table, ", ".join(map(repr, strange[:5])) + ", …" * (len(strange) > 5)
        line = test.lines[test.select(target).index(strange[0])]
        remedy = f"labels of column {target!r} that training knows, or data.kind=regression for numbers"
        raise RequestError(f"{test.path}:{line}: labels that {table.path} does not have: {listed}", remedy=remedy)
    names: dict[str, str] = {}
    for cell in sorted(set().union(*cells), key=lambda cell: (values[cell] or 0.0 if is_whole else 0.0, cell)):
        names.setdefault(labels[cell], cell)
    indices = {label: index for index, label in enumerate(names)}
    return [torch.tensor([indices[labels[cell]] for cell in each]) for each in cells], tuple(names.values())


def read_table(path: Path, format: CsvFormat) -> CsvTable:
    """Read a .jsonl or CSV file; see `read_csv`. A field that a record lacks, or null, NaN, infinity: an empty cell."""
    if path.suffix != ".jsonl" or not path.is_file():
        return read_csv(path, format)
    records = JsonLines(path)
    found = [records[index] for index in range(len(records))]
    if not found:
        raise RequestError(f"--data csv: {path}: no rows")
    columns = list(dict.fromkeys(name for record in found for name in record))
    places = [records.describe(index) for index in range(len(found))]
    doubts: dict[str, str] = {}
    rows = [
        [_to_cell(record.get(name), name, place, doubts) for name in columns]
        for record, place in zip(found, places, strict=True)
    ]
    lines = [int(place.rpartition(":")[2]) for place in places]
    return CsvTable(path, columns, rows, lines, decimals=format.list_decimals(".,"), doubts=doubts)


def _to_cell(value: object, name: str, place: str, doubts: dict[str, str]) -> str:
    """Return a value as text; note the first NaN or infinity of a column in `doubts`."""
    if value is None:
        return ""
    if isinstance(value, float) and not math.isfinite(value):
        doubts.setdefault(name, f"{place}: {value} in column {name!r} counts as missing, as do others")
        return ""
    if not isinstance(value, str | int | float):
        problem = f"--data csv: {place}: {name} is a {type(value).__name__}, not a text, a number or a boolean"
        raise RequestError(problem, remedy="plain values; conversations are for --data chat with --model-dir")
    return str(value).strip()
