"""From a dataset's name to the splits that a run trains on."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from multigpu_cli.config.schema import DataConfig
from multigpu_cli.data.base import Source
from multigpu_cli.data.registry import DATASETS
from multigpu_cli.data.split import by_sample
from multigpu_cli.errors import RequestError
from multigpu_cli.runtime import plugins

_MOST_SCANNED = 100_000


def open_source(config: DataConfig, seed: int) -> Source:
    """Load the dataset that --data names: one of ours, or the user's own.

    A user's factory is called once per split with those of `split` (train, val, test), `data_dir, mode, seed` and of
    the data.args that it names, and returns a map-style Dataset or None; one without a `split` parameter returns a
    single dataset, which is divided by seed, 80/10/10.

    Raises:
        RequestError: no such dataset, files missing or damaged, or a factory that returns something else.
    """
    factory = plugins.find(config.name, DATASETS, flag="--data")
    offered = {"data_dir": config.dir, "mode": config.mode, "seed": seed}
    parameters = inspect.signature(factory).parameters
    if "split" not in parameters:
        found = plugins.call(factory, offered, config.args, where="data")
        source = found if isinstance(found, Source) else _divided(_dataset(found, config.name), seed)
    else:
        source = _from_splits(factory, offered, config.args, config.name)
    if len(source.train) == 0:  # type: ignore[arg-type]
        raise RequestError(f"--data {config.name}: the training set is empty")
    return source


def _from_splits(factory: Callable[..., Any], offered: Mapping[str, Any], args: dict[str, Any], name: str) -> Source:
    splits = {}
    for split in ("train", "val", "test"):
        found = plugins.call(factory, {**offered, "split": split}, args, where="data")
        splits[split] = None if found is None else _dataset(found, f"{name}, split {split}")
    if splits["train"] is None:
        raise RequestError(f"--data {name}: the factory returned None for split='train'")
    return _described(splits["train"], splits["val"], splits["test"])


def _divided(dataset: Dataset[Any], seed: int) -> Source:
    parts = by_sample(len(dataset), (0.1, 0.1), seed)  # type: ignore[arg-type]
    train, val, test = (_part(dataset, part) for part in parts)
    return _described(train, val, test)


def _part(dataset: Dataset[Any], indices: Tensor) -> Dataset[Any]:
    if isinstance(dataset, TensorDataset):
        return TensorDataset(*(tensor[indices] for tensor in dataset.tensors))
    return Subset(dataset, indices.tolist())


def _dataset(found: Any, name: str) -> Dataset[Any]:
    if not (hasattr(found, "__getitem__") and hasattr(found, "__len__")):
        raise RequestError(
            f"--data {name}: the factory returned a {type(found).__name__}",
            remedy="return a map-style dataset: an object with __len__ and __getitem__(index) → (input, target)",
        )
    if len(found) == 0:
        raise RequestError(f"--data {name}: the dataset is empty", remedy="return None where there is no such split")
    return found  # type: ignore[no-any-return]


def _described(train: Dataset[Any], val: Dataset[Any] | None, test: Dataset[Any] | None) -> Source:
    """Learn input shape and class count from the data itself."""
    sample = train[0]
    if not isinstance(sample, (tuple, list)) or len(sample) != 2:
        raise RequestError(f"--data: a sample must be (input, target), not {type(sample).__name__}")
    shape = tuple(getattr(sample[0], "shape", ()))
    return Source(train=train, val=val, test=test, input_shape=shape, num_classes=_classes(train))


def _classes(dataset: Dataset[Any]) -> int:
    """How many classes: the dataset says so, or its labels do; 0 where targets are no class numbers."""
    inner = dataset.dataset if isinstance(dataset, Subset) else dataset
    if isinstance(count := getattr(inner, "num_classes", None), int):
        return count
    if names := getattr(inner, "classes", None):
        return len(names)
    if isinstance(dataset, TensorDataset):
        inputs, labels = dataset.tensors[0], dataset.tensors[1]
        if labels.ndim > 1 and {inputs.dtype, labels.dtype} == {torch.int64} and inputs.shape == labels.shape:
            return int(torch.maximum(inputs, labels).max()) + 1  # tokens, and those that follow them
        return 0 if labels.is_floating_point() or labels.ndim != 1 else int(labels.max()) + 1
    count = len(dataset)  # type: ignore[arg-type]
    if count > _MOST_SCANNED:
        raise RequestError(
            f"--data: {count} samples are too many to look through for the number of classes",
            remedy="give the dataset an attribute num_classes",
        )
    found = [dataset[index][1] for index in range(count)]
    whole = all(getattr(label, "ndim", 0) == 0 and float(label).is_integer() for label in found)
    return int(max(map(int, found))) + 1 if whole else 0
