"""Augmentation of whole batches of images, keyed per sample (see keyed_random.py), on any device."""

from functools import lru_cache

import torch
from torch import Tensor

from multigpu_cli.data.keyed_random import KeyedRandom

_SHIFT, _FLIP = 0, 1  # one stream of random numbers each


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
