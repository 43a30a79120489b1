"""A LightningModule's methods on an nn.Module, since lightning itself is no dependency; and the same as a Task."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from multigpu_cli.data.loader import Batch
from multigpu_cli.tasks.base import BatchMetrics, Task
from tests.support.styles.samples import Samples


class Numbers(Samples):
    num_classes = 2

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.numbers[index], int(self.numbers[index].sum() > 0)


class LitClassifier(nn.Module):
    def __init__(self, hidden: int = 16, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.net = nn.Sequential(nn.Linear(8, hidden), nn.Tanh(), nn.Linear(hidden, 2))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


class LitAutoencoder(LitClassifier):
    def forward(self, x: Tensor) -> Tensor:
        """Its loss, so that --task from-model takes it: what was training_step."""
        return F.mse_loss(self.net(x), x[:, :2])


class Alone(Numbers):
    def __getitem__(self, index: int) -> Any:
        return (self.numbers[index],)


class TrainingStep(Task):
    """`training_step`, summed over the samples."""

    def loss_sum(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch.inputs), batch.targets, reduction="sum")

    def measure(self, model: nn.Module, batch: Batch) -> BatchMetrics:
        return BatchMetrics(self.loss_sum(model, batch).double(), torch.zeros(0, dtype=torch.int64))
