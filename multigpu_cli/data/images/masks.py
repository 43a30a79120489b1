"""Images with a mask each, for --task segmentation, in two folders whose names say which is which."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from multigpu_cli.data.collate import SampleForm
from multigpu_cli.data.files import find_split_folders, list_images, list_visible_folders
from multigpu_cli.data.transforms import open_image
from multigpu_cli.distributed.processes import say_before_run
from multigpu_cli.errors import RequestError

_LAYOUT = "images/NAME.jpg and masks/NAME.png, directly in --data-dir or within its folders train/, val/ and test/"
# in the name of a folder
_MASKS = re.compile(r"mask|label|annot|segment|trimap|manual|ground.?truth|^gt", re.IGNORECASE)
_IMAGES = re.compile(r"image|img|photo|picture|^(input|original)s?$", re.IGNORECASE)
_MASK_ENDING = re.compile(r"[ _.-](mask|label|seg|gt|anno|trimap|manual)[^/]*$", re.IGNORECASE)  # of a name: 1_mask.png
_SIDE = re.compile(  # a folder of one side of pairs
    r"^(train|test|val)?_?[AB]$|(?i:^(low|high|[lh]r|input|target|source|noisy|clean|before|after|blur|sharp))"
)
_LOSSLESS = ("PNG", "TIFF", "BMP", "GIF")  # formats, in Pillow's words, that keep class numbers
_MANY = 1000  # masks, whose reading takes seconds
_STRETCHED = {"L;2": 85, "L;4": 17}  # by which Pillow multiplies gray of 2 and of 4 bits

Entry = tuple[Path, int | Path]  # an image, and its class number or its mask


def read_mask(file: Path, values: Sequence[int], ignored: int | None) -> Any:
    """Return the class number of each pixel as an upright image of Pillow's mode I.

    `values` are the pixel values of class 0, 1, …; without any, pixels are class numbers. Raises RequestError if the
    format may have changed them, or if one is neither listed nor `ignored`.
    """
    from PIL import Image, ImageOps  # an extra

    with open_image(file, f"--data image-folder: {file}") as opened:
        kind, stretch = opened.format, _STRETCHED.get(str(opened.tile[0][3]), 1)
        pixels = np.asarray(ImageOps.exif_transpose(opened))
    if kind not in _LOSSLESS or pixels.ndim > 2 or pixels.dtype.kind == "f":
        problem = f"--data image-folder: {file}: {kind} of {pixels.dtype} {pixels.shape} is no mask of class numbers"
        raise RequestError(
            problem, remedy="save masks as PNG with one channel, gray or palette: a class number a pixel"
        )
    pixels = classes = pixels.astype(np.int32) // stretch
    if values:
        rest = np.where(pixels == ignored, pixels, -1)
        classes = np.select([pixels == value for value in values], list(range(len(values))), rest).astype(np.int32)
    if (classes < 0).any():
        problem = f"--data image-folder: {file}: a pixel has the value {pixels[classes < 0][0]}, which is no class"
        raise RequestError(problem, remedy="add it to data.values, the list of the pixel values of class 0, 1, …")
    return Image.fromarray(classes)


def choose_num_classes(
    parts: Mapping[str, Sequence[Entry]], values: Sequence[int], form: SampleForm, on_progress: Callable[[], None]
) -> int:
    """Return the number of classes: of the listed values, as a run counted them, or else as all masks hold them.

    Raises RequestError if `values` is not a list of integers, if the masks have less than two classes, or if most class
    numbers are missing there: then pixels are not class numbers.
    """
    if not isinstance(values, list | tuple) or not all(type(value) is int for value in values):
        raise RequestError(f"data.args.values: {values!r}", remedy="list the value of each class, as [0, 255]")
    if values or form.classes:
        return len(values) or form.classes or 0
    masks = [mask for pairs in parts.values() for _, mask in pairs if isinstance(mask, Path)]
    if len(masks) > _MANY:
        say_before_run(f"counting the classes in {len(masks):,} masks; a list as --set data.values=[0,1] skips this")
    numbers: set[int] = set()
    for mask in masks:
        numbers |= {*np.unique(read_mask(mask, (), form.ignored)).tolist()}
        on_progress()
    count, listed = max(numbers - {form.ignored}, default=-1) + 1, sorted(numbers)[:20]
    if not 2 <= count <= 2 * len(numbers):
        problem = f"--task segmentation: the values in the masks are {listed}, and {form.ignored} does not count"
        raise RequestError(problem, remedy=f"list that of each class: --set 'data.values={listed}'")
    return count


def _find_folders(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the folders of images, and those of masks by their names; without masks, both are empty."""
    folders = list_visible_folders(folder)
    masks = [each for each in folders if _MASKS.search(each.name) and list_images(each)]
    others = [each for each in folders if masks and each not in masks and list_images(each)]
    return [each for each in others if _IMAGES.search(each.name)] or others, masks


def refuse_masks(folder: Path) -> None:
    """Refuse a folder of classes that seems to hold masks, by the names of its folders or of the files in two."""
    images, masks = _find_folders(folder)
    alike = len(images) == len(masks) == 1 and _have_same_names(*images, *masks)
    if alike or (masks and any(_IMAGES.search(each.name) for each in images)):
        problem = f"--data image-folder: {masks[0]} seems to hold masks of the images in {images[0].name}/, not a class"
        raise RequestError(problem, remedy=f"add --task segmentation; or, if it is a class, rename {masks[0].name}/")


def describe_pairs(root: Path, names: Sequence[str], entries: Sequence[Entry]) -> str:
    """Return a warning if two classes look like the two sides of pairs, such as low/ and high/; otherwise "".

    All files of both have the same names. Numbers as names, as in cat/1.jpg and dog/1.jpg, do not suggest pairs, unless
    the names of the folders do.
    """
    stems = [{file.stem for file, number in entries if number == index} for index in range(len(names))]
    if len(names) != 2 or stems[0] != stems[1]:
        return ""
    if all(map(_SIDE.search, names)) or not all(map(str.isdecimal, stems[0])):
        first, second = names
        return (
            f"{root}: the classes {first} and {second} have files of the same names, as pairs of images do; "
            "if they are no classes, write a Dataset that returns the pairs: --data module:factory"
        )
    return ""


def _have_same_names(images: Path, masks: Path) -> bool:
    """Whether both folders have files of the same names, but for an ending such as _mask in those of the second."""
    names, others = (
        {file.relative_to(folder).with_suffix("").as_posix() for file in list_images(folder)}
        for folder in (images, masks)
    )
    return names in (others, {_MASK_ENDING.sub("", name) for name in others})


def read_pairs(root: Path) -> dict[str, list[Entry]]:
    """Return each image with its mask, by split (train, val, test); under "" if nothing is divided.

    Raises RequestError if an image has no mask of its name, or a mask no image.
    """
    folders = find_split_folders(root)
    if "train" in folders:
        chosen = {split: _choose_folders(folder) for split, folder in folders.items()}
    else:
        images, masks = _choose_folders(root)
        folders = find_split_folders(images)
        folders = folders if "train" in folders else {"": images}
        chosen = {split: (folder, masks / folder.relative_to(images)) for split, folder in folders.items()}
    pairs: dict[str, list[Entry]] = {}
    for split, (images, masks) in chosen.items():
        named, lone = _pair_files(images, masks)
        if lone:
            listed = ", ".join(map(str, lone[:5])) + (", …" if len(lone) > 5 else "")
            raise RequestError(
                f"--task segmentation: {images} and {masks} lack one image and one mask of each name: {listed}",
                remedy="give an image and its mask one name, as 1.jpg and 1.png; move images without a mask elsewhere",
            )
        pairs[split] = [(image, mask) for image, mask in named.values()]
    return pairs


def _choose_folders(folder: Path) -> tuple[Path, Path]:
    images, masks = _find_folders(folder)
    if len(images) != 1 or len(masks) != 1:
        names = ", ".join(each.name for each in images + masks) or "none by their names"
        raise RequestError(f"--task segmentation: {folder}: folders of images and masks: {names}", remedy=_LAYOUT)
    return images[0], masks[0]


def _pair_files(images: Path, masks: Path) -> tuple[dict[Path, list[Path]], list[Path]]:
    """Return the files by name, an image and its mask each, and the names that have others; names have no endings."""
    named: dict[Path, list[Path]] = {}
    for folder in (images, masks):
        for file in list_images(folder):
            named.setdefault(file.relative_to(folder).with_suffix(""), []).append(file)
    return named, sorted(
        name for name, files in named.items() if [masks in file.parents for file in files] != [False, True]
    )
