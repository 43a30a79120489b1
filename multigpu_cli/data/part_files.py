"""Finds the files of a dataset's parts by the names of folders or files: train, validation, test."""

import re
from collections.abc import Sequence
from pathlib import Path

from multigpu_cli.data.arrow_files import SPLIT_NAMES
from multigpu_cli.errors import RequestError


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
