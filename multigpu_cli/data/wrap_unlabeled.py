"""Wraps a dataset without targets: adds a dummy target to each sample, so that the loaders accept it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from multigpu_cli.data.collate import PAIR, Collate, SampleForm, get_sample, unwrap_dataset
from multigpu_cli.runtime.model_call import TARGETS


class UnlabeledDataset(Dataset[Any]):
    """A dataset of inputs only: tensors, mappings without a target, or anything that its collate_fn accepts.

    Args:
        target: the placeholder target of each sample.
    """

    def __init__(self, dataset: Dataset[Any], target: Tensor) -> None:
        self.dataset, self.target = dataset, target
        own = getattr(unwrap_dataset(dataset), "collate_fn", None)
        if own is not None:
            self.collate_fn = self._collating(own)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        item = self.dataset[index]
        if hasattr(self, "collate_fn"):
            return item
        if isinstance(item, Mapping):
            return {**item, TARGETS[0]: self.target}
        return (*item, self.target) if isinstance(item, tuple | list) else (item, self.target)

    def _collating(self, own: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        def collate_fn(samples: list[Any]) -> Any:
            return own(samples), self.target.expand(len(samples), *self.target.shape)

        return collate_fn


def wrap_unlabeled(dataset: Dataset[Any], train: Dataset[Any], form: SampleForm = PAIR) -> UnlabeledDataset | None:
    """The dataset with placeholder targets; None if it has targets, or if the training samples have none."""
    item, known = get_sample(dataset, 0), get_sample(train, 0)
    if (own := getattr(unwrap_dataset(dataset), "collate_fn", None)) is not None:
        item, known = own([item]), own([known])
    if _has_target(item, form) or not _has_target(known, form):
        return None
    return UnlabeledDataset(dataset, torch.zeros_like(Collate(train, form)([(0, get_sample(train, 0))]).targets[0]))


def _has_target(item: Any, form: SampleForm) -> bool:
    if isinstance(item, Mapping):
        return any(name in item for name in TARGETS)
    return isinstance(item, tuple | list) and len(item) > (form.inputs or 1)
