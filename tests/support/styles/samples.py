"""What the datasets of all styles have in common: few samples, drawn by the name of their split."""

from typing import Any

import torch
from torch.utils.data import Dataset


class Samples(Dataset[Any]):
    """24 samples to train, 8 to validate and 8 to test; `numbers` are eight of each."""

    def __init__(self, split: str) -> None:
        self.drawn = torch.Generator().manual_seed(len(split))
        self.numbers = torch.randn(24 if split == "train" else 8, 8, generator=self.drawn)

    def __len__(self) -> int:
        return len(self.numbers)


class Tokens(Samples):
    """`words`: twelve of a vocabulary of ten, each the one before plus the first of the text."""

    num_classes = 10

    def __init__(self, split: str) -> None:
        super().__init__(split)
        first = torch.randint(1, 4, (len(self), 1), generator=self.drawn)
        self.words = (first + first * torch.arange(12)) % 10
