"""A network that runs out of memory, as --model names it: above a number of samples, from some training pass on."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn


class Greedy(nn.Module):
    def __init__(self, inner: nn.Module, limit: int, after: int) -> None:
        super().__init__()
        self.inner, self.limit, self.after, self.passes = inner, limit, after, 0

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
            if len(inputs) > self.limit and self.passes > self.after:
                raise torch.OutOfMemoryError("CUDA out of memory (played)")
        logits: Tensor = self.inner(inputs)
        return logits


def net(input_shape: Sequence[int], num_classes: int, limit: int = 3, after: int = 0) -> nn.Module:
    return Greedy(nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), num_classes)), limit, after)
