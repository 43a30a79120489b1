"""Augmentation of whole batches of images, keyed per sample (see keyed_random.py), on any device."""

from functools import lru_cache

import torch
from torch import Tensor

from multigpu_cli.data.keyed_random import KeyedRandom

_SHIFT, _FLIP, _CROP = 0, 1, 2  # one stream of random numbers each
_WIDEST = 4 / 3  # width to height of a crop, and the inverse


def shift(images: Tensor, draws: KeyedRandom, reach: int) -> Tensor:
    """Shift each image (n, C, H, W) by up to `reach` pixels in both directions, filling with 0.

    The same as a random crop of the image padded by `reach` (He et al. 2015).
    """
    return _move(images, draws.uniform(_SHIFT, 2), reach)


def mirror(images: Tensor, draws: KeyedRandom) -> Tensor:
    """Flip each image left to right with probability ½."""
    return _flip(images, draws.uniform(_FLIP))


def shift_and_mirror(images: Tensor, draws: KeyedRandom, reach: int) -> Tensor:
    """`shift` and `mirror`, with random numbers drawn in one call."""
    drawn = draws.uniform_streams((_SHIFT, 2), (_FLIP, 1))
    return _flip(_move(images, drawn[:, :2], reach), drawn[:, 2:])


def random_resized_crop(images: Tensor, draws: KeyedRandom, smallest: float) -> Tensor:
    """Cut a rectangle out of each image (n, C, H, W), and resize it to the size of the image.

    Its area is `smallest` to 1 of the image's, its width 3/4 to 4/3 of its height before it is cut to the image, as
    torchvision's RandomResizedCrop (Szegedy et al. 2015).
    """
    area, shape, across, down = draws.uniform(_CROP, 4).unbind(1)
    area, shape = smallest + (1 - smallest) * area, _WIDEST ** (2 * shape - 1)
    wide, high = (area * shape).sqrt().clamp(max=1), (area / shape).sqrt().clamp(max=1)
    theta = torch.zeros(len(images), 2, 3, device=images.device)
    theta[:, 0, 0], theta[:, 1, 1] = wide, high
    theta[:, 0, 2], theta[:, 1, 2] = (1 - wide) * (2 * across - 1), (1 - high) * (2 * down - 1)
    grid = torch.nn.functional.affine_grid(theta, list(images.shape), align_corners=False)
    found = torch.nn.functional.grid_sample(images.float(), grid, padding_mode="border", align_corners=False)
    return found.to(images.dtype) if images.is_floating_point() else found.round_().to(images.dtype)


def _move(images: Tensor, drawn: Tensor, reach: int) -> Tensor:
    n, channels, height, width = images.shape
    padded = torch.nn.functional.pad(images, (reach,) * 4)
    runs = padded.flatten().unfold(0, width, 1)  # every run of W pixels, a view; a row of the result is one of them
    down, right = (drawn * (2 * reach + 1)).long().unbind(1)
    corner = down.mul_(padded.shape[-1]).add_(right)
    start = _rows(n * channels, height, *padded.shape[-2:], images.device).view(n, -1) + corner[:, None]
    return runs.index_select(0, start.flatten()).view(images.shape)


@lru_cache(maxsize=8)
def _rows(planes: int, height: int, tall: int, wide: int, device: torch.device) -> Tensor:
    """(planes, height) int64: where the rows of each padded plane begin; cached, since every batch needs it."""
    first = torch.arange(planes, device=device)[:, None] * tall
    return (first + torch.arange(height, device=device)) * wide


def _flip(images: Tensor, drawn: Tensor) -> Tensor:
    mirror, images = (drawn[:, 0] < 0.5).view(-1, 1, 1, 1), images.contiguous()
    mirrored = images.flip(-1)
    if images.shape[-1] * images.element_size() % 8:
        return torch.where(mirror, mirrored, images)
    # Eight bytes at a time: where the two differ, take the mirrored bits. `torch.where` broadcasts slowly.
    eights, found = images.view(torch.int64), mirrored.view(torch.int64)
    return found.bitwise_xor_(eights).bitwise_and_(-mirror.long()).bitwise_xor_(eights).view(images.dtype)
