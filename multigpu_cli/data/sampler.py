"""One order of samples: (seed, epoch, position) → sample, whoever asks, however often the run was interrupted."""

import torch
from torch import Tensor

from multigpu_cli.planning.keys import key


def epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """(count,) int64: the sample at each position of an epoch."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(key(seed, epoch)))
