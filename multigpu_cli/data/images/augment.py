"""RandAugment: two random operations on each image of a batch, keyed per sample; torchvision carries them out.

Source: E. Cubuk et al., "RandAugment: Practical automated data augmentation with a reduced search space",
arXiv:1909.13719. The operations and their magnitudes are those of torchvision.transforms.v2.RandAugment, which itself
takes one image at a time and draws from torch's global generator.
"""

from collections.abc import Callable
from math import atan, degrees
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional

from multigpu_cli.data.collate import describe_shapes, to_device
from multigpu_cli.data.order import KeyedRandom
from multigpu_cli.errors import RequestError

_STREAM = 3  # of random numbers; those of transforms.py are 0 to 2


class _Operation(NamedTuple):
    """An operation on images (n, C, H, W) at a level, `first` to `last` by magnitude, of either sign if `signed`."""

    apply: Callable[[Tensor, float], Tensor]
    first: float = 0.0
    last: float = 0.0
    signed: bool = False


def _shear(images: Tensor, across: float, down: float) -> Tensor:
    return _transform(images, shear=[degrees(atan(across)), degrees(atan(down))], center=[0, 0])


def _translate(images: Tensor, across: float, down: float) -> Tensor:
    """Move images by shares of their width and their height."""
    return _transform(images, translate=[int(across * images.shape[-1]), int(down * images.shape[-2])])


def _transform(images: Tensor, **given: Any) -> Tensor:
    unmoved = {"angle": 0.0, "translate": [0, 0], "scale": 1.0, "shear": [0.0, 0.0]}
    return functional.affine(images, **unmoved | given)  # type: ignore[no-any-return]


_OPERATIONS = (
    _Operation(lambda images, level: images),
    _Operation(lambda images, level: _shear(images, level, 0), 0, 0.3, signed=True),
    _Operation(lambda images, level: _shear(images, 0, level), 0, 0.3, signed=True),
    _Operation(lambda images, level: _translate(images, level, 0), 0, 150 / 331, signed=True),
    _Operation(lambda images, level: _translate(images, 0, level), 0, 150 / 331, signed=True),
    _Operation(functional.rotate, 0, 30, signed=True),
    _Operation(lambda images, level: functional.adjust_brightness(images, 1 + level), 0, 0.9, signed=True),
    _Operation(lambda images, level: functional.adjust_saturation(images, 1 + level), 0, 0.9, signed=True),
    _Operation(lambda images, level: functional.adjust_contrast(images, 1 + level), 0, 0.9, signed=True),
    _Operation(lambda images, level: functional.adjust_sharpness(images, 1 + level), 0, 0.9, signed=True),
    _Operation(lambda images, level: functional.posterize(images, round(level)), 8, 4),
    _Operation(lambda images, level: functional.solarize(images, 255 * level), 1, 0),
    _Operation(lambda images, level: functional.autocontrast(images)),
    _Operation(lambda images, level: functional.equalize(images)),
)


class RandAugment:
    """Two operations on each image, one after the other, of a strength (`magnitude`) from 0 to 30."""

    def __init__(self, magnitude: int) -> None:
        levels = ((float(torch.linspace(each.first, each.last, 31)[magnitude]), each) for each in _OPERATIONS)
        self._choices = [(each.apply, sign * level) for level, each in levels for sign in (1, -1 if each.signed else 1)]

    def __call__(self, images: Tensor, draws: KeyedRandom) -> Tensor:
        """Images (n, 1 or 3, H, W) uint8, augmented; draws are on the CPU: the host must know the operations."""
        for drawn in draws.uniform(_STREAM, 2).unbind(1):
            images = self._apply((drawn * len(self._choices)).long(), images)
        return images

    def _apply(self, chosen: Tensor, images: Tensor) -> Tensor:
        """One operation on each image; those with the same one are worked on together."""
        found = torch.empty_like(images)
        for choice in chosen.unique().tolist():
            apply, level = self._choices[choice]
            at = to_device((chosen == choice).nonzero()[:, 0], images.device)
            found[at] = apply(images[at], level)
        return found

    def check(self, inputs: Any) -> None:
        """Refuse what torchvision's operations can't work on."""
        images = isinstance(inputs, Tensor) and inputs.ndim == 4 and inputs.shape[1] in (1, 3)
        if not images or inputs.dtype != torch.uint8:
            raise RequestError(
                f"data.rand_augment: inputs are {describe_shapes(inputs)}",
                remedy="images (1 or 3 channels, height, width) of uint8, 0 to 255; or "
                "torchvision.transforms.v2.RandAugment in your dataset, before it converts its images",
            )
