"""The order of training samples in an epoch, a function of seed and epoch alone."""

from typing import Protocol

import torch
from torch import Tensor

from multigpu_cli.planning.rng_keys import make_key

EVAL_EPOCH = 1 << 40  # stands for the epoch where samples are not trained on: their random state never changes


def epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """(count,) int64: the sample at each position of an epoch."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(make_key(seed, epoch)))


class SampleOrder(Protocol):
    """An order of samples of the user's own; how many samples an epoch has, and which come at each position."""

    def __len__(self) -> int: ...

    def __call__(self, epoch: int) -> Tensor:
        """(count,) int64: the same on every rank, and whenever it is asked for."""
