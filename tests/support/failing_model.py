"""A user's network that goes wrong on one rank in one training pass, as --model names it."""

import os
import signal
import time
from collections.abc import Sequence
from math import prod

from torch import Tensor, nn
from torch.nn import functional
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


class Failing(nn.Module):
    """What goes wrong: drift, spoil, raise, sleep, SIGKILL, SIGSTOP, …"""

    def __init__(self, inner: nn.Module, how: str, rank: int, at: int) -> None:
        super().__init__()
        self.inner, self.how, self.passes = inner, how, 0
        self.at = at if os.environ.get("RANK", "0") == str(rank) else -1

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += self.training
        if self.training and self.passes == self.at:
            self.fault()
        logits: Tensor = self.inner(inputs)
        return logits

    def fault(self) -> None:
        if self.how == "drift":
            next(self.inner.parameters()).data[0, 0] += 1.0
            return
        if self.how == "spoil":
            register_optimizer_step_post_hook(spoil)
            return
        if self.how == "raise":
            raise ValueError("the planted fault")
        if self.how == "sleep":
            time.sleep(60)
        os.kill(os.getpid(), signal.Signals[self.how])


def spoil(optimizer: Optimizer, *_: object) -> None:
    """Change what the optimizer keeps beside the weights."""
    for state in optimizer.state.values():
        state["exp_avg_sq"] *= 1.5


def net(input_shape: Sequence[int], num_classes: int, how: str = "raise", rank: int = 1, at: int = 5) -> nn.Module:
    """One layer; its first pass is the rehearsal's, the second under DDP may be its warm-up."""
    return Failing(nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), num_classes)), how, rank, at)


def deep(input_shape: Sequence[int], num_classes: int, how: str = "raise", rank: int = 1, at: int = 6) -> nn.Module:
    """Blocks, of which the second one fails."""
    size = prod(input_shape)
    blocks = [Failing(nn.Linear(size, size), how, rank if block == 1 else -1, at) for block in range(3)]
    return nn.Sequential(nn.Flatten(), nn.Sequential(*blocks), nn.Linear(size, num_classes))


class Forgetful(nn.Sequential):
    """From some training pass on, the bias takes no part in what it returns."""

    def __init__(self, features: int, num_classes: int, at: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(features, num_classes))
        self.at, self.passes = at, 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += self.training
        layer = self[1]
        assert isinstance(layer, nn.Linear)
        bias = layer.bias.detach() if self.training and self.passes >= self.at else layer.bias
        return functional.linear(self[0](inputs), layer.weight, bias)


def forgetful(input_shape: Sequence[int], num_classes: int, at: int = 5) -> nn.Module:
    return Forgetful(prod(input_shape), num_classes, at)


class Choosy(nn.Sequential):
    """The bias takes part for some samples only: all of those of the first pass, and of evaluations."""

    def __init__(self, features: int, num_classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(features, num_classes))
        self.passes = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += self.training
        layer = self[1]
        assert isinstance(layer, nn.Linear)
        skips = self.training and self.passes > 1 and float(inputs.sum()) > 0
        return functional.linear(self[0](inputs), layer.weight, None if skips else layer.bias)


def choosy(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    return Choosy(prod(input_shape), num_classes)


class _Block(nn.Sequential):
    """A class of its own, so that it is what is wrapped."""


class Dropping(nn.Module):
    """Leaves out one of its blocks in each training pass after the first two: which one depends on the samples."""

    def __init__(self, features: int, num_classes: int, unlike: bool) -> None:
        super().__init__()
        widths = [features + 4 * place * unlike for place in range(3)]
        self.blocks = nn.ModuleList(_Block(nn.Linear(features, width), nn.Linear(width, features)) for width in widths)
        self.head, self.passes = nn.Linear(features, num_classes), 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += self.training
        left_out = int(float(inputs.sum().abs()) * 100) % 3 if self.training and self.passes > 2 else -1
        found = inputs.flatten(1)
        for place, block in enumerate(self.blocks):
            found = found if place == left_out else found + block(found).tanh()
        logits: Tensor = self.head(found)
        return logits


def dropping(input_shape: Sequence[int], num_classes: int, unlike: bool = False) -> nn.Module:
    return Dropping(prod(input_shape), num_classes, unlike)
