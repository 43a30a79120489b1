"""Locates and reads the files of a dataset, and words the errors if they are missing or damaged."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from multigpu_cli.config.data_place import FILES
from multigpu_cli.errors import RequestError, did_you_mean


def locate_single_file(name: str, data_dir: str | None, file: str | None, layout: str) -> Path:
    """The file of a dataset: --data-dir itself, or the file of that folder that data.file names, or its only one.

    Args:
        name: of the dataset, one of FILES.
        file: data.file, for a folder that holds several.
        layout: what is expected, for messages.

    Raises:
        RequestError: no --data-dir, the file does not exist, or several could be meant.
    """
    if data_dir is None:
        raise RequestError(f"--data {name} needs --data-dir, the file or the folder that holds it", remedy=layout)
    place = Path(data_dir).expanduser()
    if not place.exists():
        raise RequestError(f"--data-dir {data_dir}: there is no such file or folder", remedy=layout)
    if place.is_dir():
        return locate_other_file(name, place, file) if file else _locate_only_file(name, place, layout)
    if file not in (None, place.name):
        raise RequestError(
            f"--data-dir {data_dir} together with data.file={file}: two different files",
            remedy=f"the folder as --data-dir, or --set data.file={place.name}",
        )
    return place


def locate_other_file(name: str, place: Path, file: str) -> Path:
    """A file or folder beside the data, or else relative to the working directory.

    Args:
        name: of the dataset, for messages.
        place: --data-dir, a folder or the file itself.

    Raises:
        RequestError: it exists in neither place.
    """
    folder = place if place.is_dir() else place.parent
    found = [path for path in (folder / Path(file).expanduser(), Path(file)) if path.exists()]
    if not found:
        names = sorted(path.name for path in folder.glob("*") if path.is_file())
        remedy = did_you_mean(Path(file).name, names) if names else "another folder"
        raise RequestError(f"--data {name}: {folder / file}: there is no such file", remedy=remedy)
    return found[0]


def _locate_only_file(name: str, folder: Path, layout: str) -> Path:
    fits = ([path for path in folder.glob("*") if path.name.lower().endswith(suffix)] for suffix in FILES[name])
    paths = sorted(next(filter(None, fits), []))  # table.csv is preferred to a table.csv.gz beside it
    if len(paths) != 1:
        found = ", ".join(path.name for path in paths[:5]) or "none at all"
        raise RequestError(
            f"--data {name}: {folder} must hold one {FILES[name][0]} file, and it holds {found}",
            remedy=f"--data-dir FILE, for example {paths[0]}" if paths else layout,
        )
    return paths[0]


@dataclass(frozen=True, kw_only=True)
class DatasetFiles:
    """Where the user gets a dataset and how its folder must look.

    Attributes:
        name: as in --data NAME.
        address: the page or archive to get it from.
        folders: places relative to --data-dir where the files may lie ("." for itself), tried in this order.
        layout: the files expected there, for the message.
    """

    name: str
    address: str
    folders: Sequence[str]
    layout: str

    def folder(self, data_dir: str | None, landmarks: Iterable[str]) -> Path:
        """The first of the folders that holds one of the landmarks (files or folders).

        Raises:
            RequestError: none does; says what was looked for where, where to get it, and how the folder must look.
        """
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
        """All bytes of a file.

        Raises:
            RequestError: it is missing or can't be read.
        """
        try:
            return file.read_bytes()
        except FileNotFoundError as missing:
            raise RequestError(f"--data {self.name}: {file} is missing", remedy=self.remedy) from missing
        except OSError as unreadable:
            raise self.damaged_error(file, f"can't be read ({unreadable.strerror})") from unreadable

    def check_labels(self, file: Path, labels: np.ndarray, low: int, high: int) -> np.ndarray:
        """The labels as int64 counted from 0.

        Raises:
            RequestError: one lies outside low … high.
        """
        wrong = np.flatnonzero((labels < low) | (labels > high))
        if len(wrong):
            value = labels[wrong[0]]
            raise self.damaged_error(file, f"label {value} of sample {wrong[0] + 1} is not one of {low} … {high}")
        return labels.astype(np.int64) - low
