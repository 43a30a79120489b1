"""--data arrow, jsonl and tar: datasets of rows that stay on the disk."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from inspect import Signature, signature
from pathlib import Path
from typing import Any

from multigpu_cli.data.rows.arrow import SPLIT_NAMES, ArrowStore, find_arrow_files
from multigpu_cli.data.rows.jsonl import JsonStore
from multigpu_cli.data.rows.source import RowOptions, build_row_source
from multigpu_cli.data.rows.tar import TarStore
from multigpu_cli.data.source import DataSource
from multigpu_cli.errors import RequestError

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


def find_part_files(name: str, data_dir: str | None, endings: Sequence[str], layout: str) -> dict[str, list[Path]]:
    """The files of train, val and test, in the order of their names; all of them are `train` where no name says more.

    A part is a folder (train/…), or the files with its name as a word in theirs (train.jsonl, birds-train-0003.tar).

    Args:
        name: of the dataset, for messages.
        endings: of the files' names, in lower case.
        layout: what is expected, for messages.

    Raises:
        RequestError: no such folder, no such files, or files of which nobody knows to what part they belong.
    """
    if data_dir is None:
        raise RequestError(f"--data {name} needs --data-dir, the file or the folder that holds it", remedy=layout)
    place = Path(data_dir).expanduser()
    if not place.exists():
        raise RequestError(f"--data-dir {data_dir}: there is no such file or folder", remedy=layout)
    if place.is_file():
        return {"train": [place]}
    folders = {part: [place / each for each in names if (place / each).is_dir()] for part, names in SPLIT_NAMES.items()}
    found = {part: _list_files(each[0], endings) for part, each in folders.items() if each}
    if found:
        return _check_train(name, place, {part: files for part, files in found.items() if files}, layout)
    files = _list_files(place, endings)
    if not files:
        raise RequestError(f"--data {name}: {place} holds no {' or '.join(endings)} file", remedy=layout)
    for file in files:
        found.setdefault(_find_part(file.name), []).append(file)
    if set(found) == {""}:
        return {"train": files}
    if "" in found:
        raise RequestError(
            f"--data {name}: {found[''][0]}: train, validation or test?",
            remedy="a part's name in that of each file, or in none; or folders train/, validation/, test/",
        )
    return _check_train(name, place, found, layout)


def _check_train(name: str, place: Path, found: dict[str, list[Path]], layout: str) -> dict[str, list[Path]]:
    if "train" not in found:
        raise RequestError(f"--data {name}: {place} has no files of a part called train", remedy=layout)
    return found


def _list_files(folder: Path, endings: Sequence[str]) -> list[Path]:
    return sorted(each for each in folder.iterdir() if each.name.lower().endswith(tuple(endings)) and each.is_file())


def _find_part(file: str) -> str:
    words = re.split(r"[^a-z]+", file.lower())
    return next((part for part, names in SPLIT_NAMES.items() if any(each in words for each in names)), "")
