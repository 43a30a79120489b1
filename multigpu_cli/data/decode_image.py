"""From an encoded image to the square of pixels that a network sees; Pillow decodes."""

import random
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multigpu_cli.errors import RequestError

IMAGENET = (123.7, 116.3, 103.5), (58.4, 57.1, 57.4)
"""Mean and deviation of ImageNet's pixels, red green blue."""


def check_pillow(name: str) -> None:
    """Refuse a dataset of images where Pillow is not installed.

    Args:
        name: of the dataset.

    Raises:
        RequestError: it is not.
    """
    try:
        import PIL  # noqa: F401
    except ImportError as missing:
        raise RequestError(
            f"--data {name} needs Pillow", remedy="pip install pillow, or this program with its extra [images]"
        ) from missing


def check_sizes(size: Any, resize: Any) -> None:
    """Refuse sizes of which no image can be made.

    Raises:
        RequestError: names the argument.
    """
    for name, value, least in (("size", size, 1), ("resize", size if resize is None else resize, size)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise RequestError(f"data.args.{name}: {value!r} pixels", remedy=f"a whole number of at least {least}")


def decode_image(file: Path | bytes, shorter: int, where: str) -> np.ndarray:
    """(height, width, 3) bytes, turned the way it was taken, its shorter side resized.

    Args:
        where: names the image, for messages.

    Raises:
        RequestError: it can't be read.
    """
    from PIL import Image, ImageOps  # an extra, and not for those who bring no images

    try:
        with Image.open(BytesIO(file) if isinstance(file, bytes) else file) as opened:
            opened.draft("RGB", (shorter, shorter))  # a JPEG is then decoded at a fraction of its size
            image = ImageOps.exif_transpose(opened).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise RequestError(
            f"{where} is no image that can be read ({error})", remedy="mend it, or take it away"
        ) from error
    scale = shorter / min(image.size)
    width, height = (max(shorter, round(side * scale)) for side in image.size)
    return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))


def cut_square(pixels: np.ndarray, size: int, *, augment: bool) -> Tensor:
    """(3, size, size) bytes from the middle; or from anywhere and half of the time mirrored, by Python's generator."""
    spare = [pixels.shape[0] - size, pixels.shape[1] - size]
    top, left = [random.randint(0, room) if augment else room // 2 for room in spare]
    cut = pixels[top : top + size, left : left + size]
    if augment and random.random() < 0.5:
        cut = cut[:, ::-1]
    return torch.from_numpy(np.ascontiguousarray(cut.transpose(2, 0, 1)))
