"""Small images (bytes) of three classes, one of them frequent and one rare, held in memory or fetched one by one."""

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

SHARES = (40, 15, 5)


def tensors(split: str, seed: int) -> TensorDataset:
    targets = torch.repeat_interleave(torch.arange(3), torch.tensor(SHARES))
    noise = torch.randn(len(targets), 1, 8, 8, generator=torch.Generator().manual_seed(seed + len(split)))
    return TensorDataset((110 + 30 * (noise + (targets - 1).view(-1, 1, 1, 1))).clamp(0, 235).byte(), targets)


class Items(Dataset[tuple[Tensor, int]]):
    """The same with augmentation of their own; torchvision's datasets have such `targets`, too."""

    num_classes = 3

    def __init__(self, split: str, seed: int) -> None:
        self.inputs, labels = tensors(split, seed).tensors
        self.targets = labels.tolist()

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.inputs[index] + torch.randint(20, (1, 8, 8), dtype=torch.uint8), self.targets[index]
