"""Loads the dataset that --data names, a built-in one or the user's own, as a DataSource."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import Any

from numpy import ndarray
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from multigpu_cli.config.schema import DataConfig
from multigpu_cli.data.collate import PAIR, SampleForm, to_tensors
from multigpu_cli.data.data_source import DataSource
from multigpu_cli.data.infer_shape import Moved, infer_source
from multigpu_cli.data.materialized_iterable import MaterializedIterable
from multigpu_cli.data.mixture import MixedSource
from multigpu_cli.data.registry import DATASETS
from multigpu_cli.data.split import split_by_sample
from multigpu_cli.errors import RequestError
from multigpu_cli.planning.rng_keys import make_key
from multigpu_cli.runtime import factories

Infer = Callable[..., DataSource]  # of train, val and test


def load_data_source(
    config: DataConfig, seed: int, form: SampleForm = PAIR, *, model_dir: str | None = None, moved: Moved = lambda: None
) -> DataSource:
    """Load the dataset that --data names: a built-in one, or the user's own.

    A user's factory is called once per split with those arguments that it names among `split` (train, val, test),
    `data_dir`, `mode`, `seed` and the data.args; it returns a map-style Dataset or None. A factory without a `split`
    parameter, or with `split` among the data.args, returns a single dataset, which is divided by seed, 80/10/10.
    Arrays (X, y) count as a dataset. `data.args.new` are the arguments for the samples to predict.

    Args:
        form: of the samples.
        model_dir: --model-dir, whose tokenizer a built-in dataset may need.
        moved: called as samples are read to count the classes.

    Raises:
        RequestError: an unknown dataset, missing or damaged files, or a factory that returns something else.
    """
    factory = factories.find_factory(config.name, DATASETS, flag="--data")
    offered: dict[str, Any] = {"data_dir": config.dir, "mode": config.mode, "seed": seed}
    if config.name in DATASETS:
        offered |= {"model_dir": model_dir, "max_length": config.max_length, "packing": config.packing}
    if config.name == "mixture":
        offered |= {"shuffle_block": config.shuffle_block, "shuffle_window": config.shuffle_window}
        load = partial(load_data_source, seed=seed, form=form, model_dir=model_dir, moved=moved)
        offered["mix"] = [_load_mixed(config, entry, load) for entry in config.mix]
    parameters = inspect.signature(factory).parameters
    infer = partial(infer_source, seed=seed, form=form, moved=moved)
    if "split" not in parameters or "split" in config.args:
        source = replace(_from_one(factory, offered, config.args, config.name, seed, infer), form=form)
    else:
        source = _from_splits(factory, offered, config.args, config.name, seed, infer)
    if len(source.train) == 0:  # type: ignore[arg-type]
        raise RequestError(
            f"--data {config.name}: the training set is empty",
            remedy="use more samples, or a smaller share for validation and test",
        )
    for split in ("train", "val", "test", "new"):
        _check_finite(getattr(source, split), f"--data {config.name}, split {split}")
    return source


def _load_mixed(config: DataConfig, entry: Mapping[str, Any], load: Callable[[DataConfig], DataSource]) -> MixedSource:
    """One dataset of data.mix, loaded as it would be alone."""
    own = replace(config, name=entry["data"], dir=entry["data_dir"], args=entry["args"], mix=())
    if own.name == "mixture":
        raise RequestError("data.mix: a mixture within a mixture", remedy="one list of all datasets")
    if own.name == "chat":
        raise RequestError("data.mix: chat can't be mixed", remedy="one train.jsonl with the conversations of all")
    label = f"{own.name} {own.dir}" if own.dir else own.name
    return MixedSource(label, load(own), entry["weight"])


def _arrays(found: Any) -> list[Tensor] | None:
    """Arrays of inputs and targets, as scikit-learn's load_… and fetch_… functions return them; else None."""
    if isinstance(found, Mapping) and {"data", "target"} <= found.keys():
        found = found["data"], found["target"]
    if not isinstance(found, tuple) or len(found) != 2 or not all(map(_holds_numbers, found)):
        return None
    return [to_tensors(each) for each in found] if len(found[0]) == len(found[1]) else None


def _holds_numbers(value: Any) -> bool:
    of_numpy = isinstance(value, ndarray) and value.dtype.kind in "fiub"
    return (of_numpy or isinstance(value, Tensor)) and value.ndim > 0


def _check_finite(dataset: Any, where: str) -> None:
    """Refuse NaN and infinity, which would make the loss non-finite; only data in memory are checked."""
    tensors = dataset.tensors if isinstance(dataset, TensorDataset) else ()
    for place, tensor in enumerate(tensors):
        kind = "target" if 0 < place == len(tensors) - 1 else "input"
        if tensor.is_floating_point() and tensor.numel() and not all(map(isfinite, tensor.aminmax())):
            sample = int((~tensor.isfinite()).nonzero()[0, 0])
            raise RequestError(
                f"{where}: the {kind} of sample {sample} contains NaN or infinity",
                remedy="leave such samples out, or replace the values (torch.nan_to_num)",
            )


def _from_one(
    factory: Callable[..., Any], offered: Mapping[str, Any], args: dict[str, Any], name: str, seed: int, infer: Infer
) -> DataSource:
    other = None
    if "new" not in inspect.signature(factory).parameters:
        other, args = args.get("new"), {key: value for key, value in args.items() if key != "new"}
    found = factories.call_factory(factory, offered, args, where="data")
    if isinstance(found, DataSource):
        source = found
    else:
        source = _split_by_seed(_dataset(found, name, seed), seed, infer)
    if other is None:
        return source
    if isinstance(found, DataSource):
        raise RequestError(
            f"data.args.new: --data {name} takes no new samples",
            remedy="leave it out; new samples are for --data csv and for a dataset of your own, MODULE:FUNCTION",
        )
    if not isinstance(other, dict):
        raise RequestError(
            f"data.args.new: {name} has no new samples for {other!r}",
            remedy="give the arguments that differ for the new samples, for instance --set 'data.new={path: new.csv}'",
        )
    from multigpu_cli.data.wrap_unlabeled import wrap_unlabeled  # late: few runs have new samples

    new = _dataset(factories.call_factory(factory, offered, args | other, where="data"), name, seed)
    return replace(source, new=wrap_unlabeled(new, source.train, source.form) or new)


def _from_splits(
    factory: Callable[..., Any], offered: Mapping[str, Any], args: dict[str, Any], name: str, seed: int, infer: Infer
) -> DataSource:
    splits = {}
    for number, split in enumerate(("train", "val", "test")):
        found = factories.call_factory(factory, {**offered, "split": split}, args, where="data")
        splits[split] = None if found is None else _dataset(found, f"{name}, split {split}", make_key(seed, number))
    if splits["train"] is None:
        raise RequestError(
            f"--data {name}: the factory returned None for split='train'",
            remedy="return a dataset; only val and test may be None",
        )
    return infer(splits["train"], splits["val"], splits["test"])


def _split_by_seed(dataset: Dataset[Any], seed: int, infer: Infer) -> DataSource:
    parts = split_by_sample(len(dataset), (0.1, 0.1), seed)  # type: ignore[arg-type]
    train, val, test = (_part(dataset, part) for part in parts)
    return infer(train, val, test)


def _part(dataset: Dataset[Any], indices: Tensor) -> Dataset[Any]:
    if isinstance(dataset, TensorDataset):
        return TensorDataset(*(tensor[indices] for tensor in dataset.tensors))
    return Subset(dataset, indices.tolist())


def _dataset(found: Any, name: str, seed: int) -> Dataset[Any]:
    if isinstance(found, IterableDataset):
        return MaterializedIterable(found, name, seed)
    if (arrays := _arrays(found)) is not None:
        inputs, targets = arrays
        return TensorDataset(inputs, targets if targets.is_floating_point() else targets.long())
    if not (hasattr(found, "__getitem__") and hasattr(found, "__len__")):
        raise RequestError(
            f"--data {name}: the factory returned something of type {type(found).__name__}",
            remedy="return a map-style dataset: an object with __len__ and __getitem__(index) → (input, target), "
            "or an IterableDataset that ends",
        )
    if len(found) == 0:
        raise RequestError(f"--data {name}: the dataset is empty", remedy="return None if there is no such split")
    return found  # type: ignore[no-any-return]
