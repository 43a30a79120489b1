"""Small images of three classes, of which one is frequent and one is rare, held in memory or fetched one by one."""

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

SHARES = (40, 15, 5)


def tensors(split: str, seed: int) -> TensorDataset:
    targets = torch.repeat_interleave(torch.arange(3), torch.tensor(SHARES))
    noise = torch.randn(len(targets), 1, 8, 8, generator=torch.Generator().manual_seed(seed + len(split)))
    return TensorDataset(noise + (targets - 1).view(-1, 1, 1, 1), targets)


class Items(Dataset[tuple[Tensor, int]]):
    """The same with augmentation of their own; torchvision's datasets have such `targets`, too."""

    num_classes = 3

    def __init__(self, split: str, seed: int) -> None:
        self.inputs, labels = tensors(split, seed).tensors
        self.targets = labels.tolist()

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.inputs[index] + 0.1 * torch.randn(1, 8, 8), self.targets[index]
