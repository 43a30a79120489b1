"""Augmentation of whole batches of images, keyed per sample (see augment.py), on whatever device they live."""

import torch
from torch import Tensor

from multigpu_cli.data.augment import Draws

_SHIFT, _FLIP = 0, 1  # one stream of random numbers each


def shifted(images: Tensor, draws: Draws, reach: int) -> Tensor:
    """Move each image (n, C, H, W) by up to `reach` pixels in both directions; what comes in is 0.

    The same as a random crop of the image padded by `reach` (He et al. 2015).
    """
    return _moved(images, draws.uniform(_SHIFT, 2), reach)


def mirrored(images: Tensor, draws: Draws) -> Tensor:
    """Mirror each image left to right with probability ½."""
    return _turned(images, draws.uniform(_FLIP))


def shifted_and_mirrored(images: Tensor, draws: Draws, reach: int) -> Tensor:
    """Both of the above."""
    drawn = draws.together((_SHIFT, 2), (_FLIP, 1))
    return _turned(_moved(images, drawn[:, :2], reach), drawn[:, 2:])


def _moved(images: Tensor, drawn: Tensor, reach: int) -> Tensor:
    n, channels, height, width = images.shape
    padded = torch.nn.functional.pad(images, (reach,) * 4)
    runs = padded.flatten().unfold(0, width, 1)  # every run of W pixels, a view; a row of the result is one of them
    down, right = (drawn * (2 * reach + 1)).long().view(n, 2, 1, 1).unbind(1)
    row = torch.arange(n * channels, device=images.device).view(n, channels, 1) * (height + 2 * reach) + down
    start = (row + torch.arange(height, device=images.device)) * (width + 2 * reach) + right
    return runs.index_select(0, start.flatten()).view(images.shape)


def _turned(images: Tensor, drawn: Tensor) -> Tensor:
    mirror = (drawn[:, 0] < 0.5) * len(images)
    chosen = mirror + torch.arange(len(images), device=images.device)
    return torch.cat([images, images.flip(-1)]).index_select(0, chosen)  # copies whole images, four times where's speed
