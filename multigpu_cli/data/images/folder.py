"""Images in one folder for each class, or with a mask each, decoded as they are needed, by loader processes.

DATA_DIR/cat/a.jpg  DATA_DIR/dog/b.png              divided by seed, 80/10/10
DATA_DIR/train/cat/…  DATA_DIR/val/…  DATA_DIR/test/…   as they are; without val, 10 % of train

With --task segmentation there are images/ and masks/ in place of the classes; or images/train/, masks/train/, …
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from multigpu_cli.config.types import integer
from multigpu_cli.data import files, transforms
from multigpu_cli.data.collate import PAIR, SampleForm
from multigpu_cli.data.images.masks import (
    Entry,
    choose_num_classes,
    describe_pairs,
    read_mask,
    read_pairs,
    refuse_masks,
)
from multigpu_cli.data.order import split_by_sample
from multigpu_cli.data.source import SPLITS, DataSource
from multigpu_cli.errors import RequestError

_LAYOUT = "a folder for each class: DATA_DIR/cat/…, DATA_DIR/dog/…, or the same within train/, val/ and test/"


class Images(Dataset[tuple[Tensor, Tensor | int]]):
    """Bytes (3, size, size), and the class number, or that of each pixel, (size, size) int64.

    The shorter side becomes `resize`, then a square of `size` is cut out: from the middle, or in training with
    augmentation from anywhere, half of the time mirrored, as the seed of (seed, epoch, sample) decides. `open_mask`
    opens the masks, which are cut as their images are. A broken file is named when it is met.
    """

    def __init__(
        self, entries: Sequence[Entry], size: int, resize: int, open_mask: Callable[[Path], Any], *, augment: bool
    ) -> None:
        self.entries, self.size, self.resize, self.augment = entries, size, resize, augment
        self.open_mask = open_mask

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def targets(self) -> list[int | Path]:
        """The class number of each image, or the file of its mask."""
        return [target for _, target in self.entries]

    @property
    def names(self) -> list[str]:
        """The files, from where the program was started."""
        return [os.path.normpath(path) for path, _ in self.entries]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor | int]:
        path, target = self.entries[index]
        where = f"--data image-folder: {path}"
        if isinstance(target, int):
            pixels = transforms.decode_image(path, self.resize, where)
            return transforms.cut_square(pixels, self.size, augment=self.augment), target
        image, mask = transforms.read_colors(path, where), self.open_mask(target)
        if image.size != mask.size:
            problem = "{}: {}×{} pixels, and its mask {}×{}".format(where, *image.size, *mask.size)
            raise RequestError(problem, remedy="save each mask in the size of its image")
        both = np.dstack([transforms.resize_pixels(layer, self.resize) for layer in (image, mask)])
        cut = transforms.cut_square(both, self.size, augment=self.augment)
        return cut[:3].byte(), cut[3].long()


def load(
    data_dir: str | None,
    mode: str,
    seed: int,
    form: SampleForm = PAIR,
    moved: Callable[[], None] = lambda: None,
    size: Annotated[int, integer(1)] = 64,  # the square that the model sees, in pixels
    resize: Annotated[int | None, integer(1)] = None,  # what the shorter side becomes first (default: a seventh more)
    augment: bool = True,
    new: str | None = None,  # a folder of images whose classes nobody knows, for predictions
    values: Sequence[int] = (),  # pixel values of class 0, 1, … in masks; empty if they are the class numbers
) -> DataSource:
    """The images of a folder, with their classes, or for --task segmentation with their masks."""
    larger = transforms.choose_shorter_side(size, resize)
    transforms.check_pillow("image-folder")
    root = files.locate_data("image-folder", data_dir, _LAYOUT)
    if form.ignored is None:
        names, parts = _read_classes(root)
        num_classes, doubt = len(names), describe_pairs(root, names, next(iter(parts.values())))
    else:
        names, parts, doubt = [], read_pairs(root), ""
        num_classes = choose_num_classes(parts, values, form, moved)
    parts = _divide(parts, seed)
    if new:
        parts["new"] = _list_new(root, new)
    open_mask = partial(read_mask, values=values, ignored=form.ignored)
    make = partial(Images, size=size, resize=larger, open_mask=open_mask)
    part_names = [name for name in (*SPLITS, "new") if parts.get(name)]  # not "", which was divided
    splits = {name: make(parts[name], augment=augment and name == "train") for name in part_names}
    return DataSource(
        **splits,  # type: ignore[arg-type]
        input_shape=transforms.model_input_shape((3, size, size), mode),
        num_classes=num_classes,
        class_names=tuple(names),
        warnings=(doubt,) if doubt else (),
        prepare=transforms.Standardised(*transforms.IMAGENET, mode),
        model="resnet18" if names else "torchvision/lraspp_mobilenet_v3_large",
    )


def _list_new(root: Path, new: str) -> list[Entry]:
    """Return the images of the folder `new`, as class 0; RequestError if it contains no images."""
    folder = files.locate_other_file("image-folder", root, new)
    entries: list[Entry] = [(path, 0) for path in files.list_images(folder)]
    if not entries:
        remedy = "a folder within --data-dir, or a whole path"
        raise RequestError(f"data.args.new: {folder} holds no images", remedy=remedy)
    return entries


def _divide(parts: dict[str, list[Entry]], seed: int) -> dict[str, list[Entry]]:
    """Return the parts with a tenth of train as val, if there is none; undivided ones ("") also get a tenth as test."""
    if "val" in parts:
        return parts
    entries, shares = (parts["train"], (0.1,)) if "train" in parts else (parts[""], (0.1, 0.1))
    divided = zip(SPLITS, split_by_sample(len(entries), shares, seed), strict=False)
    return parts | {split: [entries[at] for at in numbers.tolist()] for split, numbers in divided}


def _read_classes(root: Path) -> tuple[list[str], dict[str, list[Entry]]]:
    """Return the names of the classes, and all images with their class number by split, or under "" if undivided."""
    folders = files.find_split_folders(root)
    folders = folders if "train" in folders else {"": root}
    numbers: dict[str, int] = {}
    parts: dict[str, list[Entry]] = {}
    for split, folder in folders.items():
        refuse_masks(folder)
        images = {
            path.name: listed for path in files.list_visible_folders(folder) if (listed := files.list_images(path))
        }
        numbers = numbers or {name: number for number, name in enumerate(images)}  # of train, the first split
        if unknown := [name for name in images if name not in numbers]:
            problem = f"--data image-folder: {folder / unknown[0]} is a class that train/ does not have"
            raise RequestError(problem, remedy=f"the classes are {', '.join([*numbers][:10])}")
        if not images or len(numbers) < 2:
            holds = f"holds images of {'a single' if images else 'no'} class"
            raise RequestError(f"--data image-folder: {folder} {holds}", remedy=_LAYOUT)
        parts[split] = [(path, numbers[name]) for name, listed in images.items() for path in listed]
    return [*numbers], parts
