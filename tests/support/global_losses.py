"""Losses over the global batch, as --task and --task from-model name them, and networks that make rows."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, cdist, nn
from torch.nn.functional import cross_entropy, normalize, relu
from torch.utils.data import TensorDataset

from multigpu_cli.tasks.own_loss import GlobalBatchTask


def pairs(split: str, seed: int, count: int = 90) -> TensorDataset:
    """Two noisy views of each sample, and its class."""
    draw = torch.Generator().manual_seed(seed + len(split))
    count = count if split == "train" else 25
    samples = torch.randn(count, 1, 6, generator=draw)
    views = samples + 0.3 * torch.randn(count, 2, 6, generator=draw)
    return TensorDataset(views, torch.arange(count) % 3)


def encoder(norm: bool = False, dropout: float = 0.0) -> nn.Module:
    between: list[nn.Module] = [nn.BatchNorm1d(16)] if norm else []
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 16), *between, nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 4))


class Towers(nn.Module):
    """One tower for each view, and a learned temperature."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.left, self.right = nn.Sequential(nn.Linear(6, 8), nn.Dropout(dropout)), nn.Linear(6, 8)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, views: Tensor) -> dict[str, Tensor]:
        rows = {"left": self.left(views[:, 0]), "right": self.right(views[:, 1])}
        return {name: normalize(row, dim=1) for name, row in rows.items()} | {"scale": self.scale.expand(len(views))}


class OwnLoss(Towers):
    """The same with its loss, which uses the temperature."""

    def forward(self, views: Tensor) -> dict[str, Tensor]:
        return {name: row for name, row in super().forward(views).items() if name != "scale"}

    def global_loss(self, rows: Mapping[str, Tensor], targets: Tensor) -> Tensor:
        return contrast({**rows, "scale": self.scale.view(1)})


def contrast(rows: Mapping[str, Any]) -> Tensor:
    logits = rows["left"] @ rows["right"].T * rows["scale"][0].exp()
    own = torch.arange(len(logits), device=logits.device)
    return (cross_entropy(logits, own) + cross_entropy(logits.T, own)) / 2


class Contrast(GlobalBatchTask):
    def loss(self, rows: Any, targets: Tensor) -> Tensor:
        return contrast(rows)


class Triplets(GlobalBatchTask):
    """Of each sample the farthest of its class against the nearest of another one."""

    def loss(self, rows: Tensor, targets: Tensor) -> Tensor:
        apart, same = cdist(rows, rows), targets[:, None] == targets
        farthest = apart.masked_fill(~same, -1.0).amax(1)
        nearest = apart.masked_fill(same, 1e3).amin(1)
        return relu(farthest - nearest + 1.0).mean()


class SupCon(GlobalBatchTask):
    def loss(self, rows: Tensor, targets: Tensor) -> Tensor:
        rows, own = normalize(rows, dim=1), torch.eye(len(rows), dtype=torch.bool, device=rows.device)
        shares = (rows @ rows.T / 0.5).masked_fill(own, -1e9).log_softmax(1)
        same = (targets[:, None] == targets) & ~own
        return -(shares * same).sum(1).div(same.sum(1).clamp(min=1)).mean()


class DrawnNegatives(GlobalBatchTask):
    """Contrasts each sample with one that is drawn."""

    def loss(self, rows: Tensor, targets: Tensor) -> Tensor:
        apart = (rows - rows[torch.randperm(len(rows))]).square().sum(1)  # smooth also for a sample drawn for itself
        return relu(1.0 - apart).mean()


class ViewsInTurn(GlobalBatchTask):
    """Wrong: two rows for each sample."""

    def rows(self, model: Any, batch: Any) -> Tensor:
        return model(batch.inputs).repeat(2, 1)  # type: ignore[no-any-return]

    def loss(self, rows: Tensor, targets: Tensor) -> Tensor:
        return rows.mean()


class LossOfEach(GlobalBatchTask):
    """Wrong: a loss of each sample."""

    def loss(self, rows: Tensor, targets: Tensor) -> Tensor:
        return rows.sum(1)


class OwnTemperature(GlobalBatchTask):
    """Wrong: no optimizer moves its parameter."""

    def __init__(self, source: Any, config: Any) -> None:
        super().__init__(source, config)
        self.scale = torch.zeros(1, requires_grad=True)

    def loss(self, rows: Tensor, targets: Tensor) -> Tensor:
        return (rows * self.scale).mean()
