"""Networks and tasks with state that is neither weight nor mean: queues, teachers, codebooks, annealing.

None of them draws random numbers in forward or mixes samples, so that the size of micro-batches only rounds.
"""

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, mse_loss, normalize, one_hot

from multigpu_cli.data.loader import Batch
from multigpu_cli.tasks.base import BatchMetrics, Task
from tests.support.wait_until import wait_until

DIES_AFTER = "AFTER_STEP_DIES_AFTER"  # environment variable: a checkpoint, in the step after which a rank is killed
FEATURES, HIDDEN, QUEUE, CODES = 6, 8, 32, 5


def encoder() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, HIDDEN))


def die_if_asked(step: int) -> None:
    checkpoint = Path(os.environ.get(DIES_AFTER, "step_0"))
    is_last = int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1
    if is_last and step == int(checkpoint.name.removeprefix("step_")) + 1 and DIES_AFTER in os.environ:
        wait_until(checkpoint.exists, "the checkpoint is written")
        os.kill(os.getpid(), signal.SIGKILL)


def copy_of(network: nn.Module, build: Any) -> nn.Module:
    """A frozen copy that follows the network."""
    copy: nn.Module = build().requires_grad_(False)
    copy.load_state_dict(network.state_dict())
    return copy


def follow(copy: nn.Module, network: nn.Module, share: float) -> None:
    for own, other in zip(copy.parameters(), network.parameters(), strict=True):
        own.lerp_(other, share)


class MoCo(nn.Module):
    """Two views, a momentum encoder, and a queue of keys of former steps; its outputs are a tensor (n, features)."""

    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.query = encoder()
        self.key = copy_of(self.query, encoder)
        self.register_buffer("queue", normalize(torch.randn(QUEUE, HIDDEN)))

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        queries = normalize(self.query(inputs))
        with torch.no_grad():
            keys = normalize(self.key(inputs.flip(1)))
        logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ self.queue.T], 1)
        return cross_entropy(logits / 0.2, torch.zeros_like(targets)), keys

    def after_step(self, step: int, outputs: Tensor) -> None:
        die_if_asked(step)
        follow(self.key, self.query, 0.1)
        self.queue = torch.cat([outputs, self.queue])[:QUEUE]


class MeanTeacher(nn.Module):
    """A teacher that averages the student; it has no outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.student = encoder()
        self.teacher = copy_of(self.student, encoder)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        outputs: Tensor = self.student(inputs)
        return cross_entropy(outputs, targets) + mse_loss(outputs, self.teacher(inputs.flip(1)))

    def after_step(self, step: int) -> None:
        die_if_asked(step)
        follow(self.teacher, self.student, 1 / (1 + step))


class Codebook(nn.Module):
    """A vector-quantized autoencoder whose codebook is an average; its outputs are a dict of codes and features."""

    codes: Tensor
    counts: Tensor
    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder(), nn.Linear(HIDDEN, FEATURES)
        self.register_buffer("codes", torch.randn(CODES, HIDDEN))
        self.register_buffer("counts", torch.ones(CODES))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        features = self.encoder(inputs)
        nearest = (features[:, None] - self.codes).square().sum(2).argmin(1)
        code = self.codes[nearest]
        loss = mse_loss(self.decoder(features + (code - features).detach()), inputs) + mse_loss(features, code)
        return {"loss": loss, "nearest": nearest, "features": features, "distance": (features - code).norm()}

    def after_step(self, step: int, outputs: dict[str, Tensor]) -> None:
        die_if_asked(step)
        assert "loss" not in outputs
        chosen = one_hot(outputs["nearest"], CODES).to(self.codes.dtype)
        self.counts.lerp_(chosen.sum(0), 0.2)
        features = outputs["features"].to(self.codes.dtype)  # of 16 bits with --amp bf16
        self.sums.lerp_(chosen.T @ features, 0.2)
        self.codes.copy_(self.sums / (self.counts[:, None] + 1e-3))
        unused = torch.randint(len(features), (CODES,))  # dead codes start again at some sample
        self.codes.copy_(torch.where(self.counts[:, None] < 0.05, features[unused], self.codes))


class Annealed(nn.Module):
    """An autoencoder whose second loss weighs more from step to step."""

    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder(), nn.Linear(HIDDEN, FEATURES)
        self.register_buffer("weight", torch.zeros(()))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        features = self.encoder(inputs)
        divergence: Tensor = features.square().sum(1).mean() / 2
        return mse_loss(self.decoder(features), inputs) + self.weight * divergence

    def after_step(self, step: int) -> None:
        die_if_asked(step)
        self.weight.fill_(min(1.0, step / 8))


class ByRank(Annealed):
    """Its weight is another one on each rank, which is wrong."""

    def after_step(self, step: int) -> None:
        self.weight.fill_(int(os.environ["RANK"]))


class Prototyped(nn.Module):
    """What `Prototypes` trains."""

    prototypes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()
        self.register_buffer("prototypes", normalize(torch.randn(3, HIDDEN)))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.encoder(inputs), self.prototypes


class Prototypes(Task):
    """A task whose classes have a running mean of features each, which pulls the features of its samples.

    The network, a `Prototyped`, only computes features; all else is the task's.
    """

    def loss_sum(self, model: Any, batch: Batch) -> Tensor:
        features, prototypes = model(batch.inputs)
        distance: Tensor = (features - prototypes[batch.targets]).square().sum()
        return distance + cross_entropy(linear(features, prototypes), batch.targets, reduction="sum")

    def measure(self, model: nn.Module, batch: Batch) -> BatchMetrics:
        return BatchMetrics(self.loss_sum(model, batch).double(), torch.zeros(0, dtype=torch.int64))

    def step_outputs(self, returned: Any) -> Tensor:
        return returned[0]  # type: ignore[no-any-return]

    def after_step(self, model: nn.Module, step: int, outputs: Tensor) -> None:
        die_if_asked(step)
        assert isinstance(model, Prototyped)
        model.prototypes.lerp_(normalize(outputs.mean(0) + model.prototypes), 0.1)
