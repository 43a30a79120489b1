"""Images in one folder for each class, decoded as they are needed, by loader processes.

DATA_DIR/cat/a.jpg  DATA_DIR/dog/b.png              divided by seed, 80/10/10
DATA_DIR/train/cat/…  DATA_DIR/val/…  DATA_DIR/test/…   as they are; without val, 10 % of train
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from torch import Tensor
from torch.utils.data import Dataset

from multigpu_cli.config.paths import IMAGES, is_hidden
from multigpu_cli.config.types import integer
from multigpu_cli.data.files import locate_other_file
from multigpu_cli.data.order import split_by_sample
from multigpu_cli.data.source import DataSource
from multigpu_cli.data.transforms import (
    IMAGENET,
    Standardised,
    check_pillow,
    choose_shorter_side,
    cut_square,
    decode_image,
    model_input_shape,
)
from multigpu_cli.errors import RequestError

_VALIDATION = ("val", "valid", "validation")
_LAYOUT = "a folder for each class: DATA_DIR/cat/…, DATA_DIR/dog/…, or the same within train/, val/ and test/"

Entry = tuple[Path, int]


class Images(Dataset[tuple[Tensor, int]]):
    """Bytes (3, size, size) and the class number; a broken file is named when it is met.

    The shorter side becomes `resize`, then a square of `size` is cut out: from the middle, or in training with
    augmentation from anywhere, half of the time mirrored, as the seed of (seed, epoch, sample) decides.
    """

    def __init__(self, entries: Sequence[Entry], size: int, resize: int, *, augment: bool) -> None:
        self.entries, self.size, self.resize, self.augment = entries, size, resize, augment

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def targets(self) -> list[int]:
        """The class number of each image."""
        return [label for _, label in self.entries]

    @property
    def names(self) -> list[str]:
        """The files, from where the program was started."""
        return [os.path.normpath(path) for path, _ in self.entries]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.entries[index]
        pixels = decode_image(path, self.resize, f"--data image-folder: {path}")
        return cut_square(pixels, self.size, augment=self.augment), label


def load(
    data_dir: str | None,
    mode: str,
    seed: int,
    size: Annotated[int, integer(1)] = 64,  # the square that the model sees, in pixels
    resize: Annotated[int | None, integer(1)] = None,  # what the shorter side becomes first (default: a seventh more)
    augment: bool = True,
    new: str | None = None,  # a folder of images whose classes nobody knows, for predictions
) -> DataSource:
    """The images of a folder."""
    larger = choose_shorter_side(size, resize)
    check_pillow("image-folder")
    if data_dir is None:
        raise RequestError("--data image-folder needs --data-dir", remedy=_LAYOUT)
    root = Path(data_dir).expanduser()
    names, train, val, test = _splits(root, seed)

    def images(entries: list[Entry], *, training: bool = False) -> Images | None:
        return Images(entries, size, larger, augment=augment and training) if entries else None

    learnt = images(train, training=True)
    assert learnt is not None
    return DataSource(
        train=learnt,
        val=images(val),
        test=images(test),
        new=images([(path, 0) for path in _images_of(locate_other_file("image-folder", root, new))]) if new else None,
        input_shape=model_input_shape((3, size, size), mode),
        num_classes=len(names),
        class_names=tuple(names),
        prepare=Standardised(*IMAGENET, mode),
        model="resnet18",
    )


def _splits(root: Path, seed: int) -> tuple[list[str], list[Entry], list[Entry], list[Entry]]:
    """Class names, and the images for training, validation and test."""
    if not (root / "train").is_dir():
        names, entries = _classes(root)
        parts = [[entries[at] for at in part.tolist()] for part in split_by_sample(len(entries), (0.1, 0.1), seed)]
        return names, parts[0], parts[1], parts[2]
    names, train = _classes(root / "train")
    given = next((root / name for name in _VALIDATION if (root / name).is_dir()), None)
    if given is None:
        kept, held = split_by_sample(len(train), (0.1,), seed)
        train, val = [train[at] for at in kept.tolist()], [train[at] for at in held.tolist()]
    else:
        val = _classes(given, names)[1]
    return names, train, val, _classes(root / "test", names)[1] if (root / "test").is_dir() else []


def _classes(folder: Path, known: list[str] | None = None) -> tuple[list[str], list[Entry]]:
    """The names of the folders that hold images, sorted, and all images with their class."""
    found: dict[str, list[Path]] = {}
    for place in sorted(path for path in folder.glob("*") if path.is_dir() and not is_hidden(path.name)):
        if files := _images_in(place):
            found[place.name] = files
    names = known or list(found)
    numbers = {name: number for number, name in enumerate(names)}
    if unknown := [name for name in found if name not in numbers]:
        raise RequestError(
            f"--data image-folder: {folder / unknown[0]} is a class that train/ does not have",
            remedy=f"the classes are {', '.join(names[:10])}",
        )
    if not found or len(names) < 2:
        raise RequestError(
            f"--data image-folder: {folder} holds images of {'a single' if found else 'no'} class", remedy=_LAYOUT
        )
    return names, [(path, numbers[name]) for name, paths in found.items() for path in paths]


def _images_in(folder: Path) -> list[Path]:
    files: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not is_hidden(name)]  # os.walk enters those that are left
        files += [Path(place, name) for name in names if not is_hidden(name)]
    return sorted(
        (file for file in files if file.suffix.lower() in IMAGES and file.is_file()), key=lambda file: file.parts
    )


def _images_of(folder: Path) -> list[Path]:
    if files := _images_in(folder):
        return files
    raise RequestError(f"data.args.new: {folder} holds no images", remedy="a folder within --data-dir, or a whole path")
