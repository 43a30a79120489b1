"""Weights of classes, for the loss and for the choice of samples: as given, or balanced over the training samples."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from multigpu_cli.config.types import ClassWeights
from multigpu_cli.data.collate import PAIR, SampleForm, get_sample, report_own_code, to_pair
from multigpu_cli.data.source import DataSource
from multigpu_cli.errors import RequestError, did_you_mean
from multigpu_cli.planning.batch import make_key
from multigpu_cli.runtime.model_call import IGNORED

_WEIGHTED = 0x3E16  # keeps this stream of random numbers apart from the others'


def resolve_class_weights(wanted: ClassWeights, source: DataSource, key: str) -> Tensor:
    """(classes,) float64: the weight of each class; messages name the setting by `key`.

    `balanced` gives samples ÷ (classes × samples of the class), so that all classes weigh the same and a training
    sample weighs 1 on average, as in scikit-learn; the label -100 does not count. A class not in a mapping weighs 1.
    """
    classes = source.num_classes
    if wanted == "balanced":
        labels = _labels_of(source, key)
        counts = torch.bincount(labels[labels != IGNORED], minlength=classes).double()
        weights = counts.sum() / (classes * counts.clamp(min=1))
    elif isinstance(wanted, Mapping):
        names = list(source.class_names or map(str, range(classes)))
        if unknown := [name for name in wanted if name not in names]:
            raise RequestError(f"{key}: the data has no class {unknown[0]!r}", remedy=did_you_mean(unknown[0], names))
        weights = torch.tensor([wanted.get(name, 1.0) for name in names], dtype=torch.float64)
    elif len(wanted) == classes:
        weights = torch.tensor(wanted, dtype=torch.float64)
    else:
        raise RequestError(
            f"{key}: {len(wanted)} weights for {classes} classes", remedy="one for each class, or {class: weight}"
        )
    if not weights.any():
        raise RequestError(f"{key}: no class has a weight above 0", remedy="a weight above 0")
    return weights


def find_unlike_label(source: DataSource) -> RequestError | None:
    """The error for a dataset whose list of labels is not what it hands out, as three of its samples show it."""
    if isinstance(source.train, TensorDataset) or (listed := read_labels(source.train, source.form)) is None:
        return None
    for index in (0, len(listed) // 2, len(listed) - 1):
        target = to_pair(get_sample(source.train, index), f"sample {index}", source.form)[1]
        if isinstance(target, Tensor) and target.ndim == listed[index].ndim == 0 and target != listed[index]:
            return RequestError(
                f"--data: sample {index} has the label {target.item()}, and the dataset lists {listed[index].item()} "
                "for it: classes would be weighed by the wrong labels",
                remedy="an attribute `targets` of the dataset: the label of each sample as it hands it out",
            )
    return None


def resolve_sample_weights(wanted: ClassWeights, source: DataSource, key: str) -> Tensor:
    """(n,) float64: the weight of each training sample, which is that of its class, and 0 with the label -100."""
    labels = _labels_of(source, key)
    weights = resolve_class_weights(wanted, source, key)[labels.clamp(min=0)] * (labels != IGNORED)
    if not float(weights.sum()) > 0:
        raise RequestError(f"{key}: no training sample has a weight above 0", remedy="a weight above 0")
    return weights


def draw_samples(weights: Tensor, seed: int, epoch: int) -> Tensor:
    """(n,) int64: as many samples as there are, drawn with replacement by weight; a function of seed and epoch."""
    ends = weights.cumsum(0)
    generator = torch.Generator().manual_seed(make_key(seed, epoch, _WEIGHTED))
    drawn = torch.rand(len(weights), generator=generator, dtype=torch.float64) * ends[-1]
    last = int(weights.nonzero()[-1])  # rounding never leads past it
    return torch.searchsorted(ends, drawn, right=True).clamp_(max=last)


def count_repeats(order: Tensor) -> Tensor:
    """(n,) int64: how often the sample at each position came before it."""
    samples, positions = order.sort(stable=True)
    repeats = torch.empty_like(order)
    repeats[positions] = torch.arange(len(order)) - torch.searchsorted(samples, samples)
    return repeats


def _labels_of(source: DataSource, key: str) -> Tensor:
    labels = read_labels(source.train, source.form)
    if labels is None or labels.ndim != 1 or labels.is_floating_point():
        problem = f"{key}: the classes of the training samples are not known before they are loaded"
        raise RequestError(problem, remedy="give the dataset an attribute `targets`: the class number of each sample")
    labels = labels.long()
    counted = labels[labels != IGNORED]
    if len(counted) and not 0 <= int(counted.min()) <= int(counted.max()) < source.num_classes:
        raise RequestError(
            f"{key}: the labels of the training samples reach from {int(counted.min())} to {int(counted.max())}, and "
            f"there are {source.num_classes} classes",
            remedy=f"use labels from 0 to {source.num_classes - 1}",
        )
    return labels


def read_labels(dataset: Dataset[Any], form: SampleForm = PAIR) -> Tensor | None:
    """(n,) the labels, without loading samples: torchvision's have them as `targets` or `labels`; None if unknown."""
    if isinstance(dataset, TensorDataset):
        targets = to_pair(dataset.tensors, "a sample", form)[1]
    elif isinstance(dataset, Subset):
        labels = read_labels(dataset.dataset, form)
        return None if labels is None else labels[torch.as_tensor(dataset.indices)]
    else:
        listed = (getattr(dataset, name, None) for name in ("targets", "labels"))
        targets = next((each for each in listed if each is not None), None)
        transform = getattr(dataset, "target_transform", None)  # torchvision's datasets pass each number through it
        if transform is not None and targets is not None:
            numbers = targets.tolist() if hasattr(targets, "tolist") else targets
            with report_own_code(dataset, "target_transform", ".targets"):
                targets = [transform(target) for target in numbers]
    try:
        labels = torch.as_tensor(targets)
        return labels if len(labels) == len(dataset) else None  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):  # a number, names of classes, or nothing: unknown
        return None
