"""Locates and reads the files of a dataset, and words the errors if they are missing or damaged."""

import errno
import json
import os
import re
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import file_digest, sha256
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from multigpu_cli.capabilities import FILES
from multigpu_cli.config.paths import IMAGES, is_hidden
from multigpu_cli.config.regular_files import refuse_special_file
from multigpu_cli.errors import RequestError, TrainingError, did_you_mean
from multigpu_cli.runtime.factories import import_extra

_SPLITS = {  # as those who publish them call the parts of a dataset
    "train": ("train", "training"),
    "val": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}


def locate_data(name: str, data_dir: str | None, layout: str) -> Path:
    """The file or folder of the dataset `name`; a message tells the `layout` that is expected."""
    if data_dir is None:
        raise RequestError(f"--data {name} needs --data-dir, the file or the folder that holds it", remedy=layout)
    place = Path(data_dir).expanduser()
    if not place.exists():
        raise RequestError(f"--data-dir {data_dir}: there is no such file or folder", remedy=layout)
    refuse_special_file(place)
    return place


def find_split_folders(folder: Path) -> dict[str, Path]:
    """Return the folders within this one that are splits, by the names train, val and test."""
    paths = {split: [path for name in names if (path := folder / name).is_dir()] for split, names in _SPLITS.items()}
    return {split: listed[0] for split, listed in paths.items() if listed}


def list_visible_folders(folder: Path) -> list[Path]:
    """Return the folders directly within this one that are not hidden, sorted."""
    return sorted(path for path in folder.glob("*") if path.is_dir() and not is_hidden(path.name))


def list_images(folder: Path) -> list[Path]:
    """Return the images at any depth within a folder, sorted; hidden files and folders are left out."""
    files: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not is_hidden(name)]  # os.walk enters those that are left
        files += [Path(place, name) for name in names if not is_hidden(name)]
    images = (file for file in files if file.suffix.lower() in IMAGES and file.is_file())
    return sorted(images, key=lambda file: file.parts)


def find_part_files(
    name: str,
    data_dir: str | None,
    endings: tuple[str, ...],
    layout: str,
    list_files: Callable[[Path], list[Path]] | None = None,
) -> dict[str, list[Path]]:
    """The files of train, val and test; all of them are `train` where no name says more.

    A part is a folder (train/…), or the files with its name as a word in theirs (train.jsonl, birds-train-0003.tar).
    `endings` are those of the files' names, in lower case. `list_files` gives a folder's files, which then are of one
    part; None: all with these endings, by their names.
    """
    place = locate_data(name, data_dir, layout)
    if place.is_file():
        return {"train": [place]}
    list_all = list_files or (
        lambda folder: sorted(at for at in folder.glob("[!.]*") if at.name.lower().endswith(endings) and at.is_file())
    )
    folders = find_split_folders(place)
    found = {part: files for part, folder in folders.items() if (files := list_all(folder))}
    if not folders:
        if not (files := list_all(place)):
            raise RequestError(f"--data {name}: {place} holds no {' or '.join(endings)} file", remedy=layout)
        for file in files:
            words = re.split(r"[^a-z]+", file.name.lower())
            part = next((part for part, names in _SPLITS.items() if any(each in words for each in names)), "")
            found.setdefault("" if list_files else part, []).append(file)
        if set(found) == {""}:
            return {"train": files}
        if "" in found:
            raise RequestError(
                f"--data {name}: {found[''][0]}: can't tell train, validation and test apart",
                remedy="a part's name in that of each file, or in none; or folders train/, validation/, test/",
            )
    if "train" not in found:
        raise RequestError(f"--data {name}: {place} has no files of a part called train", remedy=layout)
    return found


def locate_single_file(name: str, data_dir: str | None, file: str | None, layout: str) -> Path:
    """The file of a dataset: --data-dir itself, or the file of that folder that data.file names, or its only one."""
    place = locate_data(name, data_dir, layout)
    if place.is_dir():
        return locate_other_file(name, place, file) if file else _locate_only_file(name, place, layout)
    if file not in (None, place.name):
        problem = f"--data-dir {data_dir} can't be used with data.file={file}: two different files"
        raise RequestError(problem, remedy=f"the folder as --data-dir, or --set data.file={place.name}")
    return place


def locate_other_file(name: str, place: Path, file: str) -> Path:
    """A file or folder beside the data, --data-dir at `place`, or else relative to the working directory."""
    folder = place if place.is_dir() else place.parent
    found = [path for path in (folder / Path(file).expanduser(), Path(file)) if path.exists()]
    if not found:
        names = sorted(path.name for path in folder.glob("[!.]*") if path.is_file())
        remedy = did_you_mean(Path(file).name, names) if names else "another folder"
        raise RequestError(f"--data {name}: {folder / file}: there is no such file", remedy=remedy)
    refuse_special_file(found[0])
    return found[0]


def _locate_only_file(name: str, folder: Path, layout: str) -> Path:
    fits = ([path for path in folder.glob("[!.]*") if path.name.lower().endswith(suffix)] for suffix in FILES[name])
    paths = sorted(next(filter(None, fits), []))  # table.csv is preferred to a table.csv.gz beside it
    if len(paths) != 1:
        found = ", ".join(path.name for path in paths[:5]) or "none at all"
        problem = f"--data {name}: {folder} must hold one {FILES[name][0]} file, and it holds {found}"
        raise RequestError(problem, remedy=f"--data-dir FILE, for example {paths[0]}" if paths else layout)
    refuse_special_file(paths[0])
    return paths[0]


@dataclass(frozen=True, kw_only=True)
class DatasetFiles:
    """Where the user gets a dataset and how its folder must look."""

    name: str
    address: str
    folders: Sequence[str]  # places relative to --data-dir where the files may lie (. for itself), tried in this order
    layout: str  # the files expected there, for the message

    def folder(self, data_dir: str | None, landmarks: Iterable[str]) -> Path:
        """Return the first folder that contains a landmark (a file or folder); raise RequestError if no folder does."""
        if data_dir is None:
            raise RequestError(f"--data {self.name} needs --data-dir, the folder that holds it", remedy=self.remedy)
        landmarks = list(landmarks)
        places = [Path(data_dir).expanduser() / folder for folder in self.folders]
        for place in places:
            if any((place / landmark).exists() for landmark in landmarks):
                return place
        looked = f"looked for {' or '.join(landmarks)} in {', '.join(map(str, places))}"
        kind = "is not a folder" if not places[0].is_dir() else f"holds no {self.name}"
        raise RequestError(f"--data-dir {data_dir} {kind} ({looked})", remedy=self.remedy)

    @property
    def remedy(self) -> str:
        """How to get the dataset, for any message about it."""
        how = f"get it from {self.address}, unpack it, and give its folder as --data-dir"
        return f"{how}; it must look like\n{self.layout}"

    def damaged_error(self, file: Path, fault: str) -> RequestError:
        """The error for a file that is there but wrong."""
        return RequestError(f"--data {self.name}: {file}: {fault}", remedy=f"get the file anew from {self.address}")

    def content(self, file: Path) -> bytes:
        """All bytes of a file; RequestError if it is missing or can't be read."""
        refuse_special_file(file)
        try:
            return file.read_bytes()
        except FileNotFoundError as missing:
            raise RequestError(f"--data {self.name}: {file} is missing", remedy=self.remedy) from missing
        except OSError as unreadable:
            raise self.damaged_error(file, f"can't be read ({unreadable.strerror})") from unreadable

    def check_labels(self, file: Path, labels: np.ndarray, low: int, high: int) -> np.ndarray:
        """The labels as int64 counted from 0; RequestError if one lies outside low … high."""
        wrong = np.flatnonzero((labels < low) | (labels > high))
        if len(wrong):
            value = labels[wrong[0]]
            raise self.damaged_error(file, f"label {value} of sample {wrong[0] + 1} is not one of {low} … {high}")
        return labels.astype(np.int64) - low


_MOST = 64
UNCHANGED = "complete files that do not change while they are read; the next run indexes them anew"


_DISK = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENODEV, errno.ENXIO)


def explain_unreadable(problem: str, error: Exception, remedy: str) -> TrainingError:
    """The error to raise for a file of a dataset: a RequestError, unless the disk failed, which may answer again."""
    if isinstance(error, OSError) and error.errno in _DISK:
        return TrainingError(problem, remedy="look after the disk; then the same command resumes")
    return RequestError(problem, remedy=remedy)


class OpenFiles:
    """Files that are opened when they are read, without a position: forked processes may share them."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = list(files)
        self._open: OrderedDict[int, int] = OrderedDict()

    def read(self, file: int, offset: int, size: int) -> bytes:
        """Return `size` bytes of a file; RequestError if missing or too short, TrainingError if the disk fails."""
        try:
            if file not in self._open:
                if len(self._open) == _MOST:
                    os.close(self._open.popitem(last=False)[1])
                self._open[file] = os.open(self.files[file], os.O_RDONLY | os.O_CLOEXEC)
            content = os.pread(self._open[file], size, offset)
        except OSError as error:
            raise explain_unreadable(f"--data: {self.files[file]}: {error.strerror}", error, UNCHANGED) from error
        if len(content) != size:
            raise RequestError(
                f"--data: {self.files[file]} ends at byte {offset + len(content)} of {offset + size}", remedy=UNCHANGED
            )
        return content

    def __del__(self) -> None:
        for number in self._open.values():
            os.close(number)


_REMEDY = "one JSON object per line, or all in an array: [{…}, {…}]"


class JsonLines:
    """The records of a file, one JSON object per line, or all in one array; empty lines do not count.

    The file is opened anew for each record, so that loader processes share no position in it. `digest` is its SHA-256.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places = array("q")  # three of each record
        refuse_special_file(path)
        with path.open("rb") as file:
            self.digest = file_digest(file, "sha256").hexdigest()
            file.seek(0)
            begin = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
            file.seek(0)
            for line, at, content in _find_elements(path) if begin == b"[" else find_lines(file):
                self._places.extend((line, at, len(content)))

    def __len__(self) -> int:
        return len(self._places) // 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one record; RequestError names the line if it is not a JSON object, or not UTF-8 text."""
        start, size = self._places[3 * index + 1 : 3 * index + 3]
        with self.path.open("rb") as file:
            file.seek(start)
            line = file.read(size)
        try:
            record = parse_json(line)
        except UnicodeError as error:
            raise RequestError(
                f"{self.describe(index)}: not UTF-8 text ({error})", remedy=f"{_REMEDY}; as UTF-8"
            ) from error
        except (ValueError, RecursionError) as error:
            fault = f"{error.msg} at character {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            raise RequestError(f"{self.describe(index)}: not JSON ({fault})", remedy=_REMEDY) from error
        if not isinstance(record, dict):
            raise RequestError(f"{self.describe(index)}: a {type(record).__name__}, not an object", remedy=_REMEDY)
        return record

    def describe(self, index: int) -> str:
        """The record's place, for messages: file:line."""
        return f"{self.path}:{self._places[3 * index]}"


def parse_json(text: bytes) -> Any:  # any value of JSON
    """Parse JSON in UTF-8, whose texts can be written again.

    Raises ValueError, of the type UnicodeError if a text holds half of a character; RecursionError if it is too deep.
    """
    value = json.loads(text.decode("utf-8-sig"))
    if rb"\ud" in text.lower():  # perhaps half of a surrogate pair, which no file in UTF-8 can hold
        json.dumps(value, ensure_ascii=False).encode()
    return value


def find_lines(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """Yield the lines of a file that are not empty: number from 1, first byte, and content."""
    at = 0
    for number, line in enumerate(file, 1):
        if line.strip():
            yield number, at, line
        at += len(line)


def _find_elements(path: Path) -> Iterator[tuple[int, int, str]]:
    """Yield the elements of a JSON array as `find_lines` does, a character a byte; the file is read as a whole."""
    text, decode = path.read_bytes().decode("latin-1"), json.JSONDecoder().raw_decode  # a character is a byte
    line, counted, at = 1, 0, _skip_blank(text, text.index("[") + 1)
    try:
        while text[at : at + 1] != "]":
            end = decode(text, at)[1]
            after = _skip_blank(text, end)
            if text[after : after + 1] not in (",", "]"):
                raise json.JSONDecodeError("expecting , or ]", text, after)
            line, counted = line + text.count("\n", counted, at), at
            yield line, at, text[at:end]
            at = _skip_blank(text, after + (text[after] == ","))
        if (after := _skip_blank(text, at + 1)) < len(text):
            raise json.JSONDecodeError("the array has ended", text, after)
    except json.JSONDecodeError as error:
        fault = f"{error.msg} at character {error.colno}"
        raise RequestError(f"{path}:{error.lineno}: not JSON ({fault})", remedy=_REMEDY) from error
    except RecursionError as error:
        raise RequestError(f"{path}: a record after line {line} is nested too deep", remedy=_REMEDY) from error


def _skip_blank(text: str, at: int) -> int:
    while text[at : at + 1].isspace():
        at += 1
    return at


class ParquetRecords:
    """The records of Parquet files, one after the other; nulls are left out, since a table has every column in each.

    The row group that was read last is kept. `digest` is the SHA-256 of all files.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.path, self._size, digest = paths[0], 0, sha256()
        self._groups: list[tuple[int, int, Path, int]] = []  # first row of all, and of the file; the file; the group
        self._cached: tuple[int, Any] = -1, None
        for path in paths:
            first = self._size
            refuse_special_file(path)
            with path.open("rb") as file, _open_parquet(path) as opened:
                digest.update(file_digest(file, "sha256").digest())
                for group in range(opened.num_row_groups):
                    self._groups.append((self._size, first, path, group))
                    self._size += opened.metadata.row_group(group).num_rows
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        return self._size

    def _find(self, index: int) -> tuple[int, int, Path, int]:
        return self._groups[bisect_right(self._groups, index, key=itemgetter(0)) - 1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        start, _, path, group = self._find(index)
        if self._cached[0] != start:
            with _open_parquet(path) as opened:
                self._cached = start, opened.read_row_group(group)
        return dict(_drop_nulls(self._cached[1].slice(index - start, 1).to_pylist()[0]))

    def describe(self, index: int) -> str:
        """The record's place, for messages."""
        _, first, path, _ = self._find(index)
        return f"{path}, row {index - first + 1}"


Records = JsonLines | ParquetRecords


def open_records(paths: Sequence[Path]) -> Records:
    """The records of Parquet files, or of one file of JSON."""
    return ParquetRecords(paths) if paths[0].suffix.lower() == ".parquet" else JsonLines(paths[0])


def load_pyarrow(what: str = "--data arrow") -> Any:
    """The package pyarrow; RequestError if it is not installed, and `what` needs it."""
    remedy = "pip install pyarrow, or this program with its extra [arrow]"
    return import_extra("pyarrow", f"{what} needs pyarrow", remedy)


def _open_parquet(path: Path) -> Any:
    pyarrow = load_pyarrow(str(path))
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise RequestError(f"{path}: no Parquet ({error})", remedy="a file that is whole") from error


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _drop_nulls(each) for name, each in value.items() if each is not None}
    return [_drop_nulls(each) for each in value] if isinstance(value, list) else value
