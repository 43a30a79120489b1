"""--data jsonl: rows of JSON lines that stay on the disk."""

from collections.abc import Sequence
from typing import Any

from multigpu_cli.data.data_source import DataSource
from multigpu_cli.data.json_store import JsonStore
from multigpu_cli.data.part_files import find_part_files
from multigpu_cli.data.row_source import RowOptions, build_row_source

_LAYOUT = "one .jsonl file, one JSON object per line; or a folder with train.jsonl, validation.jsonl, test.jsonl"


def load(
    data_dir: str | None,
    mode: str,
    seed: int,
    target: str | None = None,
    columns: Sequence[str] | str | None = None,
    ignore: Sequence[str] | str = (),
    kind: str = "auto",
    classes: int | Sequence[Any] | None = None,
    vocabulary: int | None = None,
) -> DataSource:
    """The records of a file or folder; the arguments are those of RowOptions.

    Raises:
        RequestError: no such files, or fields that make no samples.
    """
    files = find_part_files("jsonl", data_dir, (".jsonl", ".ndjson"), _LAYOUT)
    stores = {part: JsonStore(each) for part, each in files.items()}
    options = RowOptions(
        target=target, columns=columns, ignore=ignore, kind=kind, classes=classes, vocabulary=vocabulary
    )
    return build_row_source("jsonl", stores, mode, seed, options)
