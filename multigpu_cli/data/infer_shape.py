"""Infers input shape, number of classes and vocabulary size of a user's dataset from its samples."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from multigpu_cli.data.collate import (
    PAIR,
    Collate,
    SampleForm,
    count_declared_classes,
    get_sample,
    get_tokens,
    to_pair,
    unwrap_dataset,
)
from multigpu_cli.data.data_source import DataSource
from multigpu_cli.data.materialized_iterable import MaterializedIterable
from multigpu_cli.errors import RequestError

_MOST_SCANNED = 100_000


def infer_source(
    train: Dataset[Any], val: Dataset[Any] | None, test: Dataset[Any] | None, form: SampleForm = PAIR
) -> DataSource:
    """A DataSource of the splits, with shapes and classes inferred from the samples."""
    one = [(0, get_sample(train, 0))]
    inputs, targets = Collate(train, form)(one)  # a batch, since a collate_fn may add what a sample lacks
    held_in_memory = [part for part in (train, val, test) if isinstance(part, TensorDataset)]
    return DataSource(
        train=train,
        val=val,
        test=test,
        input_shape=tuple(getattr(inputs, "shape", (0,)))[1:],
        num_classes=_infer_vocabulary_size([to_pair(part.tensors, "a sample", form) for part in held_in_memory], 2)
        or (_classes(train, form) if isinstance(targets, Tensor) else count_declared_classes(train)),
        num_outputs=int(torch.Size(getattr(targets, "shape", (1,))[1:]).numel()),
        note="an iterable dataset, read once with its randomness: "
        if isinstance(unwrap_dataset(train), MaterializedIterable)
        else "",
        form=form,
    )


def _classes(dataset: Dataset[Any], form: SampleForm) -> int:
    """The number of classes, declared by the dataset or inferred from its labels; 0 if targets are not classes."""
    if declared := count_declared_classes(dataset):
        return declared
    if isinstance(dataset, TensorDataset):
        labels = to_pair(dataset.tensors, "a sample", form)[1]
        return 0 if labels.is_floating_point() or labels.ndim != 1 else int(labels.max()) + 1
    count = len(dataset)  # type: ignore[arg-type]
    if count > _MOST_SCANNED:
        raise RequestError(
            f"--data: {count} samples are too many to infer the number of classes from",
            remedy="give the dataset an attribute num_classes",
        )
    pairs = [to_pair(get_sample(dataset, index), f"sample {index}", form) for index in range(count)]
    if all(isinstance(label, Tensor) and label.ndim == 0 and float(label).is_integer() for _, label in pairs):
        return max(int(label) for _, label in pairs) + 1
    return _infer_vocabulary_size([(get_tokens(inputs), label) for inputs, label in pairs], 1)


def _infer_vocabulary_size(pairs: Sequence[Sequence[Any]], axes: int) -> int:
    """The vocabulary size, if samples are tokens with the next tokens as targets; else 0.

    Args:
        axes: the least number of dimensions of a sequence.
    """
    for pair in pairs:
        if len(pair) != 2 or not all(isinstance(each, Tensor) and each.dtype == torch.int64 for each in pair):
            return 0
        if pair[0].shape != pair[1].shape or pair[0].ndim < axes:
            return 0
    return max((int(each.max()) + 1 for pair in pairs for each in pair), default=0)
