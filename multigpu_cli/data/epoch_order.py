"""The order of training samples in an epoch, a function of seed and epoch only."""

from typing import Protocol

import torch
from torch import Tensor

from multigpu_cli.planning.rng_keys import make_key

EVAL_EPOCH = 1 << 40  # the epoch number of evaluation, so that random transforms give the same result each time


def epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """(count,) int64: the sample at each position of an epoch."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(make_key(seed, epoch)))


class SampleOrder(Protocol):
    """The user's own order of samples: the length of an epoch, and the sample at each position."""

    def __len__(self) -> int: ...

    def __call__(self, epoch: int) -> Tensor:
        """(count,) int64; must be the same on every rank and in every call."""
