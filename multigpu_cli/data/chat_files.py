"""Finds the .jsonl files of conversations, and divides their records into splits."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from multigpu_cli.data.json_lines import JsonLines
from multigpu_cli.data.locate_dataset_files import locate_other_file
from multigpu_cli.data.split import split_by_sample
from multigpu_cli.errors import RequestError, pluralize

_SPLITS = ("train", "val", "test")
_LAYOUT = (
    "a .jsonl file, or a folder with train.jsonl and perhaps val.jsonl and test.jsonl; datasets' "
    "to_json('train.jsonl') writes one"
)


class ChatFiles(NamedTuple):
    """The records of each split; only `train` where the file is to be divided."""

    train: JsonLines
    val: JsonLines | None = None
    test: JsonLines | None = None


def find_files(data_dir: str | None, file: str | None) -> ChatFiles:
    """The files at --data-dir.

    Args:
        file: data.file, the file in a folder that holds several.

    Raises:
        RequestError: there is none, several could be meant, or one is empty.
    """
    if data_dir is None:
        raise RequestError("--data chat needs --data-dir", remedy=_LAYOUT)
    place = Path(data_dir)
    if not place.exists():
        raise RequestError(f"--data-dir {data_dir}: there is no such file or folder", remedy=_LAYOUT)
    if place.is_dir():
        names = sorted(path.name for path in place.glob("*.jsonl"))
        if file is None and "train.jsonl" in names:
            found = {name: JsonLines(place / f"{name}.jsonl") for name in _SPLITS if f"{name}.jsonl" in names}
            return _check_records(ChatFiles(**found))
        if file is None and len(names) != 1:
            raise RequestError(
                f"--data-dir {data_dir} holds {', '.join(names) or 'no .jsonl file'}",
                remedy=f"{_LAYOUT}{'; or --set data.file=' + names[0] if names else ''}",
            )
        place = locate_other_file("chat", place, file or names[0])
    return _check_records(ChatFiles(JsonLines(place)))


def _check_records(files: ChatFiles) -> ChatFiles:
    for records in files:
        if records is not None and not len(records):
            raise RequestError(f"--data chat: {records.path} is empty", remedy="one JSON object per line")
    return files


def divide_files(files: ChatFiles, val: float, seed: int) -> dict[str, tuple[JsonLines, np.ndarray]]:
    """The records of each split, as numbers of records in a file.

    Raises:
        RequestError: too few for a validation split.
    """
    found = {name: (file, np.arange(len(file))) for name, file in zip(_SPLITS, files, strict=True) if file is not None}
    if files.val is None and val > 0:
        _check_divisible(files.train, val)
        parts = split_by_sample(len(files.train), (val,), seed)
        train, held_out = (part.sort().values.numpy() for part in parts)
        found |= {"train": (files.train, train), "val": (files.train, held_out)}
    return {name: found[name] for name in _SPLITS if name in found}


def _check_divisible(records: JsonLines, val: float) -> None:
    if not 0 < round(val * len(records)) < len(records):
        raise RequestError(
            f"--data chat: {pluralize(len(records), 'record')} in {records.path} leave none for a split of "
            f"data.val={val:g}",
            remedy="--set data.val=0, to train without validation; or a folder with train.jsonl and val.jsonl",
        )
