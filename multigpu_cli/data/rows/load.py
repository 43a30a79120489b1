"""--data arrow, jsonl and tar: datasets of rows that stay on the disk."""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from inspect import Signature, signature
from typing import Any

from multigpu_cli.data.files import find_part_files
from multigpu_cli.data.rows.arrow import ArrowStore, find_arrow_files
from multigpu_cli.data.rows.jsonl import JsonStore
from multigpu_cli.data.rows.source import RowOptions, build_row_source
from multigpu_cli.data.rows.tar import TarStore
from multigpu_cli.data.source import DataSource

_TAR = "a .tar shard or a folder with several, whose members are KEY.jpg and KEY.cls, say"
_JSON = "one .jsonl file, one JSON object per line; or a folder with train.jsonl, validation.jsonl, test.jsonl"
_OF_IMAGES = ("size", "resize", "augment")

Load = Callable[..., DataSource]


def take_options(*but: str) -> Callable[[Load], Load]:
    """Let a function of `RowOptions` take them one by one, as the user's data.args name them, but for some."""

    def decorate(load: Load) -> Load:
        @wraps(load)
        def load_with_options(data_dir: str | None, mode: str, seed: int, **options: Any) -> DataSource:
            return load(data_dir, mode, seed, RowOptions(**options))

        own = list(signature(load).parameters.values())[:-1]
        taken = [each for name, each in signature(RowOptions).parameters.items() if name not in but]
        load_with_options.__signature__ = Signature([*own, *taken])  # type: ignore[attr-defined]
        return load_with_options

    return decorate


@take_options()
def load(data_dir: str | None, mode: str, seed: int, options: RowOptions) -> DataSource:
    """The rows of a folder that `save_to_disk` wrote, of a Dataset or a DatasetDict; or of .arrow files.

    Raises:
        RequestError: no such files, no pyarrow, or columns that make no samples.
    """
    stores = {part: ArrowStore(files) for part, files in find_arrow_files(data_dir).items()}
    return build_row_source("arrow", stores, mode, seed, options)


@take_options("vocabulary")
def load_tar_rows(data_dir: str | None, mode: str, seed: int, options: RowOptions) -> DataSource:
    """The samples of shards; where nothing is said, the target is .cls, and the input the only image or array.

    Raises:
        RequestError: no such files, compressed shards, or members that make no samples.
    """
    files = find_part_files("tar", data_dir, (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tar.xz", ".tar.bz2"), _TAR)
    stores = {part: TarStore(each) for part, each in files.items()}
    known = stores["train"].columns
    if options.target is None and "cls" in known:
        options = replace(options, target="cls")
    wide = [name for name, column in known.items() if column.kind == "bytes" or column.shape]
    if options.columns is None and len(wide) == 1:
        options = replace(options, columns=wide)
    return build_row_source("tar", stores, mode, seed, options)


@take_options(*_OF_IMAGES)
def load_json_rows(data_dir: str | None, mode: str, seed: int, options: RowOptions) -> DataSource:
    """The records of a file or folder.

    Raises:
        RequestError: no such files, or fields that make no samples.
    """
    files = find_part_files("jsonl", data_dir, (".jsonl", ".ndjson"), _JSON)
    return build_row_source("jsonl", {part: JsonStore(each) for part, each in files.items()}, mode, seed, options)
