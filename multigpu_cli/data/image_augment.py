"""Augmentation of whole batches of images, keyed per sample (see augment.py), on whatever device they live."""

import torch
from torch import Tensor

from multigpu_cli.data.augment import Draws

_SHIFT, _FLIP = 0, 1  # one stream of random numbers each


def shifted(images: Tensor, draws: Draws, reach: int) -> Tensor:
    """Move each image (n, C, H, W) by up to `reach` pixels in both directions; what comes in is 0.

    The same as a random crop of the image padded by `reach` (He et al. 2015).
    """
    n, _, height, width = images.shape
    padded = torch.nn.functional.pad(images, (reach,) * 4)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # (n, C, 2·reach+1, 2·reach+1, H, W), a view
    down, right = (draws.uniform(_SHIFT, 2) * (2 * reach + 1)).long().unbind(1)
    return windows[torch.arange(n, device=images.device), :, down, right]


def mirrored(images: Tensor, draws: Draws) -> Tensor:
    """Mirror each image left to right with probability ½."""
    chosen = draws.uniform(_FLIP)[:, :, None, None] < 0.5
    return torch.where(chosen, images.flip(-1), images)  # where, not indexing: no host sync, no ragged copy


def shifted_and_mirrored(images: Tensor, draws: Draws, reach: int) -> Tensor:
    """Both of the above."""
    return mirrored(shifted(images, draws, reach), draws)
