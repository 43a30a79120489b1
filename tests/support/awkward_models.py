"""Networks with habits that are easy to break before the first step, as --model names them."""

import random
from collections import OrderedDict
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from tests.support.oom_model import refuse


class Caching(nn.Module):
    """Makes at its first forward pass what it needs: a layer's weights, a table, and a mask as long as the batch."""

    phase: Tensor | None

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layer, self.classify = nn.LazyLinear(8), nn.Linear(8, num_classes)
        self.table: Tensor | None = None
        self.mask = torch.ones(0, 1)
        self.register_buffer("phase", None)

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.layer(inputs.flatten(1))
        if self.table is None:
            self.table = torch.arange(8.0).cos()
        if self.training and self.phase is None:
            self.phase = torch.arange(8.0).sin()
        if len(self.mask) < len(inputs):
            self.mask = torch.ones(len(inputs), 1)
        logits: Tensor = self.classify(features * self.table * self.mask[: len(inputs)])
        return logits


def caching(num_classes: int) -> nn.Module:
    return Caching(num_classes)


class Half(nn.Module):
    """Its weights are bf16, so it takes no other inputs but under autocast."""

    def __init__(self, features: int, num_classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(features, num_classes).bfloat16()

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.layer(inputs.flatten(1))
        return logits


def half(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    return Half(prod(input_shape), num_classes)


class Drawing(nn.Module):
    """Augments its inputs with the generators of Python and NumPy, in evaluations too."""

    def __init__(self, features: int, num_classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(features, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        noise = torch.from_numpy(numpy.random.normal(size=inputs.shape)).float()
        logits: Tensor = self.layer(inputs * random.uniform(0.5, 2) + noise)
        return logits


def drawing(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), Drawing(prod(input_shape), num_classes))


class Greedy(nn.Module):
    """Runs out of memory in training above one number of samples, in evaluations above another."""

    def __init__(self, layer: nn.Module, training: int, evaluation: int, after: int) -> None:
        super().__init__()
        self.layer, self.limits, self.after, self.evaluations = layer, (evaluation, training), after, 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.evaluations += not self.training
        if len(inputs) > self.limits[self.training] and (self.training or self.evaluations > self.after):
            refuse()
        logits: Tensor = self.layer(inputs.flatten(1))
        return logits


def greedy(
    input_shape: Sequence[int], num_classes: int, training: int = 99, evaluation: int = 99, after: int = 0
) -> nn.Module:
    """One layer.

    Args:
        training, evaluation: the most samples that fit.
        after: so many evaluated batches fit anyway.
    """
    return Greedy(nn.Linear(prod(input_shape), num_classes), training, evaluation, after)


class Note:
    """Nothing that `torch.load(weights_only=True)` brings back."""


class Telling(nn.Module):
    """Keeps more than tensors: how many training passes it has seen, and what somebody wants it to remember."""

    def __init__(self, features: int, num_classes: int, kept: Any) -> None:
        super().__init__()
        self.layer, self.kept, self.passes = nn.Linear(features, num_classes), kept, 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += self.training
        logits: Tensor = self.layer(inputs.flatten(1))
        return logits

    def get_extra_state(self) -> dict[str, Any]:
        return {"kept": self.kept, "passes": self.passes, "last": torch.tensor([self.passes]), "bytes": b"\xff"}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.kept, self.passes = state["kept"], state["passes"]


def telling(input_shape: Sequence[int], num_classes: int, *, plain: bool = True) -> nn.Module:
    return nn.Sequential(OrderedDict(layers=Telling(prod(input_shape), num_classes, ["a", 1.5] if plain else Note())))


class Shy(nn.Module):
    """A network that is not the same on the meta device.

    Args:
        how: "silent": torch's initialiser does nothing there, and a buffer is in no state dict; "reads": its factory
            looks at a number; "keeps": it has a tensor that is no buffer; "draws": on the CPU, whatever the device.
    """

    def __init__(self, features: int, num_classes: int, how: str) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(features, 8), nn.Linear(8, num_classes)
        nn.init.trunc_normal_(self.layer.weight, std=0.3)
        nn.init.orthogonal_(self.head.weight)
        scale = torch.rand(8)
        self.register_buffer("scale", scale, persistent=how != "silent")
        self.rate = float(scale[0]) if how == "reads" else 0.5
        self.kept = scale * 2 if how == "keeps" else None
        self.order = torch.randperm(8, device="cpu").tolist() if how == "draws" else list(range(8))

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.layer(inputs.flatten(1))[:, self.order] * self.scale * self.rate
        logits: Tensor = self.head(features if self.kept is None else features + self.kept)
        return logits


def shy(input_shape: Sequence[int], num_classes: int, how: str) -> nn.Module:
    return Shy(prod(input_shape), num_classes, how)


class Drifting(nn.Module):
    """Moves its buffer in evaluation too, and makes a longer one, which no checkpoint has, for a longer batch."""

    def __init__(self, features: int, num_classes: int) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(features, 8), nn.Linear(8, num_classes)
        self.mean: Tensor
        self.positions: Tensor
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("positions", torch.zeros(1), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.layer(inputs.flatten(1)).relu()
        self.mean.mul_(0.9).add_(features.detach().mean(0), alpha=0.1)
        if len(inputs) > len(self.positions):
            self.positions = torch.arange(len(inputs)).float()
        logits: Tensor = self.head(features - self.mean) + 0 * self.positions[: len(inputs), None]
        return logits


def drifting(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    return Drifting(prod(input_shape), num_classes)
