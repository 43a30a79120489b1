"""Datasets that cannot be trained on, as --data names them."""

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset


def nothing() -> TensorDataset:
    return _samples(0)


def one() -> TensorDataset:
    return _samples(1)


def no_training(split: str) -> TensorDataset | None:
    return _samples(30) if split == "test" else None


def with_nan(split: str) -> TensorDataset:
    inputs, labels = _samples(30).tensors
    inputs[3, 1] = torch.nan
    return TensorDataset(inputs, labels)


def with_negative(split: str) -> TensorDataset:
    inputs, labels = _samples(30).tensors
    labels[2] = -1
    return TensorDataset(inputs, labels)


def raising(split: str) -> TensorDataset:
    raise ValueError("no idea")


def a_number(split: str) -> int:
    return 3


class with_labels_beyond(Dataset[tuple[Tensor, int]]):
    """Says that there are three classes."""

    num_classes = 3

    def __init__(self, split: str) -> None:
        self.inputs = torch.zeros(30, 4)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.inputs[index], index % 5


class with_a_bad_sample(with_labels_beyond):
    """Cannot read its first file."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        raise ValueError("no such image")


def _samples(count: int) -> TensorDataset:
    return TensorDataset(torch.zeros(count, 4), torch.arange(count) % 3)
