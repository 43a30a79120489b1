"""A file of JSON lines as a table: one record a row, one field a column."""

from pathlib import Path
from typing import Any

from multigpu_cli.data.csv_reader import CsvFormat, CsvTable, read_csv
from multigpu_cli.data.json_lines import JsonLines
from multigpu_cli.errors import RequestError


def read_table(path: Path, format: CsvFormat) -> CsvTable:
    """A .jsonl or CSV file; see `read_csv`.

    A field that a record lacks, or that is null, is an empty cell.

    Raises:
        RequestError: names the line where the file can't be read as a table.
    """
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
