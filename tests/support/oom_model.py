"""A network that runs out of memory, as --model names it: above a number of samples, from some training pass on."""

import os
from collections.abc import Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor, nn


class Greedy(nn.Module):
    def __init__(self, inner: nn.Module, limit: int, after: int, *, backward: bool, said: str) -> None:
        super().__init__()
        self.inner, self.limit, self.after, self.backward, self.passes = inner, limit, after, backward, 0
        self.said = said

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += self.training
        too_many = self.training and len(inputs) > self.limit and self.passes > self.after
        if too_many and not self.backward:
            refuse(said=self.said)
        logits: Tensor = self.inner(inputs)
        if too_many:
            logits.register_hook(partial(refuse, said=self.said))
        return logits


def refuse(_: Tensor | None = None, *, said: str = "") -> None:
    if said:
        raise RuntimeError(said)
    raise torch.OutOfMemoryError("CUDA out of memory (played)")


def net(
    input_shape: Sequence[int],
    num_classes: int,
    limit: int = 3,
    after: int = 0,
    rank: int | None = None,
    backward: bool = False,
    norm: bool = False,
    said: str = "",
) -> nn.Module:
    """One layer.

    Args:
        rank: the only one that it happens to; None is all of them.
        backward: it happens there, not in forward.
        said: in these words, as a library of CUDA would; torch's own way where there are none.
        norm: BatchNorm before the layer, which has seen the samples when there is no more memory.
    """
    if rank is not None and os.environ.get("RANK", "0") != str(rank):
        limit = 1 << 30
    features = prod(input_shape)
    greedy = Greedy(nn.Linear(features, num_classes), limit, after, backward=backward, said=said)
    return nn.Sequential(nn.Flatten(), *([nn.BatchNorm1d(features)] if norm else []), greedy)
