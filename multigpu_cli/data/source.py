"""From a dataset's name to the splits that a run trains on."""

import inspect
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from multigpu_cli.config.schema import DataConfig
from multigpu_cli.data.base import Source
from multigpu_cli.data.registry import DATASETS
from multigpu_cli.data.sample import Collate, as_pair, inner, sample_of
from multigpu_cli.data.split import by_sample
from multigpu_cli.errors import RequestError
from multigpu_cli.planning.keys import key
from multigpu_cli.runtime import plugins
from multigpu_cli.runtime.determinism import seed_everything

_MOST_SCANNED = 100_000
_STREAM = 0x57E4  # keeps what a stream draws apart from other random streams


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
        source = found if isinstance(found, Source) else _divided(_dataset(found, config.name, seed), seed)
    else:
        source = _from_splits(factory, offered, config.args, config.name, seed)
    if len(source.train) == 0:  # type: ignore[arg-type]
        raise RequestError(f"--data {config.name}: the training set is empty")
    return source


def _from_splits(
    factory: Callable[..., Any], offered: Mapping[str, Any], args: dict[str, Any], name: str, seed: int
) -> Source:
    splits = {}
    for number, split in enumerate(("train", "val", "test")):
        found = plugins.call(factory, {**offered, "split": split}, args, where="data")
        splits[split] = None if found is None else _dataset(found, f"{name}, split {split}", key(seed, number))
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


def _dataset(found: Any, name: str, seed: int) -> Dataset[Any]:
    if isinstance(found, IterableDataset):
        return Read(found, name, seed)
    if not (hasattr(found, "__getitem__") and hasattr(found, "__len__")):
        raise RequestError(
            f"--data {name}: the factory returned a {type(found).__name__}",
            remedy="return a map-style dataset: an object with __len__ and __getitem__(index) → (input, target), "
            "or an IterableDataset that ends",
        )
    if len(found) == 0:
        raise RequestError(f"--data {name}: the dataset is empty", remedy="return None where there is no such split")
    return found  # type: ignore[no-any-return]


class Read(Dataset[Any]):
    """A stream (IterableDataset), read once to its end, so that its samples have numbers.

    Order, resume and exactness then hold as for any dataset. What can't be promised: randomness inside of the stream is
    drawn once, in that reading, and not anew in each epoch; and it must give every process the same samples.

    Raises:
        RequestError: it is empty, or does not end within a hundred thousand samples.
    """

    def __init__(self, stream: IterableDataset[Any], name: str, seed: int) -> None:
        seed_everything(key(seed, _STREAM))
        self.samples = list(islice(stream, _MOST_SCANNED + 1))
        if not self.samples:
            raise RequestError(f"--data {name}: the stream is empty", remedy="return None where there is no such split")
        if len(self.samples) > _MOST_SCANNED:
            raise RequestError(
                f"--data {name}: no end of the stream after {_MOST_SCANNED:,} samples, which have no numbers",
                remedy="a map-style dataset (__len__ and __getitem__): only that can be resumed and shared out exactly",
            )
        for attribute in ("num_classes", "classes", "collate_fn"):
            if hasattr(stream, attribute):
                setattr(self, attribute, getattr(stream, attribute))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def _described(train: Dataset[Any], val: Dataset[Any] | None, test: Dataset[Any] | None) -> Source:
    """Learn input shape and class count from the data itself."""
    inputs, _ = Collate(train)([(0, sample_of(train, 0))])  # a batch of one: a collate_fn may make what samples lack
    shape = tuple(getattr(inputs, "shape", (0,)))[1:]
    remark = "a stream that was read once, with its randomness: " if isinstance(inner(train), Read) else ""
    classes = _vocabulary([part for part in (train, val, test) if part is not None]) or _classes(train)
    return Source(train=train, val=val, test=test, input_shape=shape, num_classes=classes, remark=remark)


def _vocabulary(splits: list[Dataset[Any]]) -> int:
    """How many tokens there are, where tensors hold tokens and those that follow them; else 0."""
    most = 0
    for split in splits:
        tensors = split.tensors if isinstance(split, TensorDataset) else ()
        kinds = {(tensor.dtype, tensor.shape) for tensor in tensors}
        if len(tensors) != 2 or len(kinds) > 1 or tensors[1].dtype != torch.int64 or tensors[1].ndim < 2:
            return 0
        most = max(most, *(int(tensor.max()) + 1 for tensor in tensors))
    return most


def _classes(dataset: Dataset[Any]) -> int:
    """How many classes: the dataset says so, or its labels do; 0 where targets are no class numbers."""
    own = inner(dataset)
    if isinstance(count := getattr(own, "num_classes", None), int):
        return count
    if names := getattr(own, "classes", None):
        return len(names)
    if isinstance(dataset, TensorDataset):
        labels = dataset.tensors[1]
        return 0 if labels.is_floating_point() or labels.ndim != 1 else int(labels.max()) + 1
    count = len(dataset)  # type: ignore[arg-type]
    if count > _MOST_SCANNED:
        raise RequestError(
            f"--data: {count} samples are too many to look through for the number of classes",
            remedy="give the dataset an attribute num_classes",
        )
    found = [as_pair(sample_of(dataset, index), f"sample {index}")[1] for index in range(count)]
    whole = all(isinstance(label, Tensor) and label.ndim == 0 and float(label).is_integer() for label in found)
    return int(max(map(int, found))) + 1 if whole else 0
