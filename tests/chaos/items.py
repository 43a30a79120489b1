"""The digits one by one, so that loader processes fetch them."""

from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from multigpu_cli.data.builtin import small_images


class Items(Dataset[tuple[Tensor, int]]):
    """A map-style dataset over images and labels that are in memory."""

    num_classes = 10

    def __init__(self, split: TensorDataset) -> None:
        self.images, self.labels = split.tensors

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index].float() / 8 - 1, int(self.labels[index])


def digits(split: str, seed: int) -> Items:
    """One part of scikit-learn's digits."""
    return Items(getattr(small_images.digits(seed), split))
