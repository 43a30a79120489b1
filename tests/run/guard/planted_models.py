"""Networks with one planted fault each, and right ones beside them, which the tests of the guard examine."""

import random
from collections.abc import Callable
from typing import ClassVar

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.checkpoint import checkpoint

GLOBAL = numpy.random.default_rng(3)


class Net(nn.Module):
    """Two layers, between which a subclass changes something."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.build()

    def build(self) -> None:
        """Add what the fault needs."""

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.last(self.change(self.first(inputs).relu()))
        return logits

    def change(self, features: Tensor) -> Tensor:
        return features


class Teacher(Net):
    def build(self) -> None:
        self.teacher = nn.Linear(8, 16).requires_grad_(False)

    def change(self, features: Tensor) -> Tensor:
        if self.training:
            for own, other in zip(self.teacher.parameters(), self.first.parameters(), strict=True):
                own.data.mul_(0.9).add_(other.data, alpha=0.1)
        return features


class Rebinding(Teacher):
    def change(self, features: Tensor) -> Tensor:
        if self.training:
            self.teacher.weight.data = 0.9 * self.teacher.weight.data + 0.1 * self.first.weight.data
        return features


class Replacing(Teacher):
    def change(self, features: Tensor) -> Tensor:
        if self.training:
            self.teacher.weight = nn.Parameter(self.teacher.weight.detach() + 1, requires_grad=False)
        return features


class InBackwardHook(Teacher):
    def build(self) -> None:
        super().build()
        self.last.register_full_backward_hook(self.follow)

    def follow(self, module: nn.Module, *gradients: object) -> None:
        self.teacher.weight.data.lerp_(self.first.weight.data + 0.1, 0.1)

    def change(self, features: Tensor) -> Tensor:
        return features


class DataDependentScale(Net):
    """Sets a trained scale from the first batch that it sees, as ActNorm does."""

    is_set: Tensor

    def build(self) -> None:
        self.scale = nn.Parameter(torch.ones(16))
        self.register_buffer("is_set", torch.tensor(False))

    def change(self, features: Tensor) -> Tensor:
        if self.training and not self.is_set:
            self.scale.data.copy_(1 / (features.detach().std(0) + 1e-3))
            self.is_set.fill_(True)
        return features * self.scale


class Renormalizing(Net):
    def build(self) -> None:
        self.table = nn.Embedding(4, 16, max_norm=1.0)

    def change(self, features: Tensor) -> Tensor:
        embedded: Tensor = self.table(features.argmax(1) % 4)
        return features + embedded


class Projecting(Net):
    def change(self, features: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.last.weight.copy_(normalize(self.last.weight, dim=1))
        return features


class Counting(Net):
    passes = 0

    def change(self, features: Tensor) -> Tensor:
        self.passes += self.training
        return features * min(1.0, self.passes / 10)


class CountingInClass(Net):
    passes = 0

    def change(self, features: Tensor) -> Tensor:
        CountingInClass.passes += self.training
        return features * min(1.0, CountingInClass.passes / 10)


class CountingForNobody(Counting):
    def change(self, features: Tensor) -> Tensor:
        self.passes += self.training
        return features


class Listing(Net):
    def build(self) -> None:
        self.losses: dict[str, list[float]] = {"all": []}

    def change(self, features: Tensor) -> Tensor:
        self.losses["all"].append(float(features.detach().sum()))
        return features


class Remembering(Net):
    def build(self) -> None:
        self.hidden: Tensor | None = None

    def change(self, features: Tensor) -> Tensor:
        self.hidden = features.detach() + (0 if self.hidden is None else self.hidden)
        return features + 0.1 * self.hidden[: len(features)].mean()


class OwnGenerator(Net):
    def build(self) -> None:
        self.numbers = numpy.random.default_rng(0)

    def change(self, features: Tensor) -> Tensor:
        return features * float(self.numbers.random())


class OwnPythonGenerator(OwnGenerator):
    def build(self) -> None:
        self.numbers = random.Random(0)  # type: ignore[assignment]


class OwnTorchGenerator(Net):
    def build(self) -> None:
        self.numbers = torch.Generator().manual_seed(0)

    def change(self, features: Tensor) -> Tensor:
        return features + torch.randn(16, generator=self.numbers)


class GlobalGenerator(Net):
    def change(self, features: Tensor) -> Tensor:
        return features * float(GLOBAL.random())


class Unseeded(Net):
    def change(self, features: Tensor) -> Tensor:
        return features * random.SystemRandom().random()


class NumpyInCheckpoint(Net):
    def change(self, features: Tensor) -> Tensor:
        kept: Tensor = checkpoint(
            lambda found: found * torch.from_numpy(numpy.random.rand(16)).float(), features, use_reentrant=False
        )
        return kept


class Gathering(Net):
    def change(self, features: Tensor) -> Tensor:
        if dist.is_initialized() and dist.get_world_size() > 1:
            total = features.detach().mean(0)
            dist.all_reduce(total)
            return features - total / dist.get_world_size()
        return features


class ScalingByRank(Net):
    def change(self, features: Tensor) -> Tensor:
        rank = dist.get_rank() if dist.is_initialized() else 0
        return features * (1 + rank)


class Observing(Net):
    """Keeps the least and the greatest features so far, from infinity."""

    low: Tensor
    high: Tensor

    def build(self) -> None:
        self.register_buffer("low", torch.full((16,), torch.inf))
        self.register_buffer("high", torch.full((16,), -torch.inf))

    def change(self, features: Tensor) -> Tensor:
        if self.training:
            self.low.copy_(torch.minimum(self.low, features.detach().amin(0)))
            self.high = torch.maximum(self.high, features.detach().amax(0))
        return features


class ObservingWithRules(Observing):
    buffer_rules: ClassVar = {"low": "min", "high": "max"}


class MovingBounds(Observing):
    """Follows the bounds of the batches by moving averages, of which the mean is the answer."""

    def change(self, features: Tensor) -> Tensor:
        if self.training:
            low, high = features.detach().amin(0), features.detach().amax(0)
            self.low.copy_(torch.where(self.low.isinf(), low, 0.9 * self.low + 0.1 * low))
            self.high.copy_(torch.where(self.high.isinf(), high, 0.9 * self.high + 0.1 * high))
        return features


class GreatestSoFar(Net):
    greatest: Tensor

    def build(self) -> None:
        self.register_buffer("greatest", torch.zeros(()))

    def change(self, features: Tensor) -> Tensor:
        if self.training:
            self.greatest = torch.maximum(self.greatest, features.detach().abs().max())
        return features / (1 + self.greatest)


class ScaledByFirstBatch(Net):
    """Sets a buffer from the first batch that it sees, of which the mean is the answer."""

    scale: Tensor

    def build(self) -> None:
        self.register_buffer("scale", torch.zeros(16))

    def change(self, features: Tensor) -> Tensor:
        if self.training and not self.scale.any():
            self.scale.copy_(features.detach().std(0))
        return features


class Ring(Net):
    """A queue whose slots are written in turn."""

    queue: Tensor
    start: Tensor

    def build(self) -> None:
        self.register_buffer("queue", normalize(torch.randn(16, 32), dim=0))
        self.register_buffer("start", torch.zeros(1, dtype=torch.int64))

    def change(self, features: Tensor) -> Tensor:
        if self.training:
            slots = (self.start + torch.arange(len(features))) % 32
            self.queue[:, slots] = normalize(features.detach(), dim=1).T
            self.start[0] = (self.start + len(features)) % 32
        return features


class Shifting(Net):
    """A queue that moves by the samples of a batch."""

    queue: Tensor

    def build(self) -> None:
        self.register_buffer("queue", torch.randn(32, 16))

    def change(self, features: Tensor) -> Tensor:
        if self.training:
            self.queue = torch.cat([features.detach(), self.queue])[:32]
        return features


class Centers(Net):
    """Moves centers of groups by their samples: in part, but from where they are."""

    centers: Tensor

    def build(self) -> None:
        self.register_buffer("centers", torch.randn(16, 16))

    def change(self, features: Tensor) -> Tensor:
        if self.training:
            group = features.argmax(1)
            self.centers[group] = 0.9 * self.centers[group] + 0.1 * features.detach()
        return features


class Mixing(Net):
    """Subtracts the mean over the batch."""

    def build(self) -> None:
        self.center = BatchCenter()

    def change(self, features: Tensor) -> Tensor:
        centered: Tensor = self.center(features)
        return centered


class BatchCenter(nn.Module):
    def forward(self, features: Tensor) -> Tensor:
        return features - features.mean(0)


class InEvaluation(Net):
    mean: Tensor

    def build(self) -> None:
        self.register_buffer("mean", torch.zeros(16))

    def change(self, features: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(features.detach().mean(0), alpha=0.1)
        return features


class WeightsInEvaluation(Net):
    def change(self, features: Tensor) -> Tensor:
        if not self.training:
            self.last.bias.data.add_(1.0)
        return features


class Failing(Net):
    """Fails from its second pass on."""

    passes = 0

    def change(self, features: Tensor) -> Tensor:
        self.passes += 1
        if self.passes > 1:
            raise KeyError("planted")
        return features


class Caching(Net):
    """Computes a table once, keeps its last features, and has a running mean, a count and a codebook in buffers."""

    mean: Tensor
    passes: Tensor
    code: Tensor
    lengths: Tensor

    def build(self) -> None:
        self.table: Tensor | None = None
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("code", torch.randn(4, 16))
        self.register_buffer("lengths", torch.zeros(1), persistent=False)

    def change(self, features: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(16.0)
        if len(self.lengths) < len(features):
            self.lengths = torch.arange(float(len(features)))
        self.seen, self.shape = features, tuple(features.shape)
        nearest = torch.cdist(features.detach(), self.code).argmin(1)
        if self.training:
            self.mean.lerp_(features.detach().mean(0), 0.1)
            self.passes += 1
            self.code.index_add_(0, nearest, 0.01 * features.detach())
        return features + self.table


class Noisy(Net):
    def change(self, features: Tensor) -> Tensor:
        noise = torch.randn_like(features) * (torch.rand(len(features), 1) > 0.5)
        mixed = features[torch.randperm(len(features))] * random.random() * numpy.random.rand()
        return nn.functional.dropout(features + noise + 0.1 * mixed, 0.3, self.training)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(4, 8, 2, dropout=0.3, batch_first=True), nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        self.lstm.flatten_parameters()
        logits: Tensor = self.last(self.lstm(inputs.view(-1, 2, 4))[0][:, -1])
        return logits


class Checkpointed(Net):
    def build(self) -> None:
        self.block = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.2))

    def change(self, features: Tensor) -> Tensor:
        kept: Tensor = checkpoint(self.block, features, use_reentrant=False)
        return kept


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.last(self.first(inputs).tanh())[:, :4]
        return logits


def lazy() -> nn.Module:
    """Lazy layers after the pass that creates their weights."""
    model = nn.Sequential(nn.LazyLinear(12), nn.LazyBatchNorm1d(), nn.ReLU(), nn.Linear(12, 4))
    model(torch.randn(4, 8))
    return model


RIGHT: dict[str, Callable[[], nn.Module]] = {
    "plain": Net,
    "batch_norm": lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)),
    "cumulative_norm": lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16, momentum=None), nn.Linear(16, 4)),
    "dropout": lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.AlphaDropout(0.2), nn.Linear(16, 4)),
    "weight_norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))),
    "spectral_norm": lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4))),
    "older_norms": lambda: nn.Sequential(
        nn.utils.spectral_norm(nn.Linear(8, 8)), nn.utils.weight_norm(nn.Linear(8, 4))
    ),
    "noise": Noisy,
    "caches": Caching,
    "lstm": Recurrent,
    "checkpointing": Checkpointed,
    "tied": Tied,
    "lazy": lazy,
    "buffer_rules": ObservingWithRules,
    "moving_bounds": MovingBounds,
    "first_batch": ScaledByFirstBatch,
    "centers": Centers,
}
