"""A model and data of a user, as they come to the Python API."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Three classes in the plane of the first two of eight numbers."""

    def __init__(self, count: int = 48) -> None:
        drawn = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(count, 8, generator=drawn)
        self.targets = (self.inputs[:, :2] > 0).sum(1)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))


def loader(count: int = 48, batch_size: int = 8, **more: Any) -> DataLoader[Any]:
    return DataLoader(Points(count), batch_size=batch_size, **more)


def weights(model: nn.Module) -> list[float]:
    """All of them, as plain numbers."""
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
