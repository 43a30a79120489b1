"""Infers input shape, number of classes and vocabulary size of a user's dataset from its samples."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from multigpu_cli.data.class_weights import read_labels
from multigpu_cli.data.collate import Collate, SampleForm, count_declared_classes, get_tokens, to_pair, unwrap_dataset
from multigpu_cli.data.data_source import DataSource
from multigpu_cli.data.epoch_order import EVAL_EPOCH
from multigpu_cli.data.materialized_iterable import MaterializedIterable
from multigpu_cli.errors import RequestError
from multigpu_cli.runtime.rank_output import say_before_run

if TYPE_CHECKING:
    from multigpu_cli.data.dataloader_fetcher import SeededDataset

_MOST_SCANNED = 100_000
_MOMENT, _INTERVAL = 1.0, 10.0  # seconds of reading until the user is told, and told again

Split = Dataset[Any] | None
Moved = Callable[[], None]  # called as samples are read, so that the watchdog sees progress


def infer_source(
    train: Dataset[Any], val: Split, test: Split, seed: int, form: SampleForm, moved: Moved = lambda: None
) -> DataSource:
    """A DataSource of the splits, with shapes and classes inferred from the samples, whose transforms are seeded."""
    from multigpu_cli.data.dataloader_fetcher import SeededDataset  # late: built-in datasets name their shapes

    samples = SeededDataset(train, seed)
    one = [samples[EVAL_EPOCH, 0]]
    inputs, targets = Collate(train, form)(one)  # a batch, since a collate_fn may add what a sample lacks
    parts = [part.tensors for part in (train, val, test) if isinstance(part, TensorDataset)]
    labeled = [to_pair(part, "a sample", form) for part in parts if len(part) > (form.inputs or 1)]
    return DataSource(
        train=train,
        val=val,
        test=test,
        input_shape=tuple(getattr(inputs, "shape", (0,)))[1:],
        num_classes=_infer_vocabulary_size(labeled, 2)
        or (_count_classes(samples, form, moved) if isinstance(targets, Tensor) else count_declared_classes(train)),
        num_outputs=int(torch.Size(getattr(targets, "shape", (1,))[1:]).numel()),
        note="an iterable dataset, read once with its randomness: "
        if isinstance(unwrap_dataset(train), MaterializedIterable)
        else "",
        form=form,
    )


def _count_classes(samples: "SeededDataset", form: SampleForm, moved: Moved) -> int:
    """The number of classes, declared by the dataset or inferred from its labels; 0 if targets are not classes.

    Labels that the dataset lists count if a few samples have them; else all samples are read once, and none is kept.
    """
    dataset = samples.dataset
    if declared := count_declared_classes(dataset):
        return declared
    if isinstance(dataset, TensorDataset):
        labels = to_pair(dataset.tensors, "a sample", form)[1]
        return 0 if labels.is_floating_point() or labels.ndim != 1 else int(labels.max()) + 1

    def needed(index: int) -> int:
        return _count_needed(*to_pair(samples[EVAL_EPOCH, index][1], f"sample {index}", form))

    if not (most := needed(0)):
        return 0
    count, listed = len(dataset), read_labels(dataset, form)  # type: ignore[arg-type]
    few = (0, count // 2, count - 1)
    if listed is not None and all(needed(index) == _count_needed(None, listed[index]) for index in few):
        return 0 if listed.double().frac().any() else _count_needed(None, listed.max())
    if count > _MOST_SCANNED:
        raise RequestError(
            f"--data: {count} samples are too many to infer the number of classes from",
            remedy="give the dataset an attribute num_classes",
        )
    for index in _report_reading(count, moved):
        if not (found := needed(index)):
            return 0
        most = max(most, found)
    return most


def _report_reading(count: int, moved: Moved) -> Iterator[int]:
    """Number the samples after the first; a reading that takes long says how far it is, and what skips it."""
    due = time.monotonic() + _MOMENT
    for index in range(1, count):
        if time.monotonic() > due:
            due = time.monotonic() + _INTERVAL
            read = f"counting the classes: {index:,} of {count:,} samples read"
            say_before_run(f"{read}; an attribute num_classes of the dataset skips this")
        moved()
        yield index


def _count_needed(inputs: Any, label: Any) -> int:
    """How many classes, or tokens where targets are the next ones, a sample calls for; 0 if it has neither."""
    if isinstance(label, Tensor) and label.ndim == 0:
        return max(1, int(label) + 1) if float(label).is_integer() else 0
    return _infer_vocabulary_size([(get_tokens(inputs), label)], 1)


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
