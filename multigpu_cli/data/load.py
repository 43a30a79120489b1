"""Loads the dataset that --data names, a built-in one or the user's own, and infers its shape and classes."""

import inspect
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from multigpu_cli.capabilities import ACTORS, DATASETS, load
from multigpu_cli.config.code_names import names_environments
from multigpu_cli.config.regular_files import refuse_special_file
from multigpu_cli.config.schema import Config, DataConfig, ModelConfig
from multigpu_cli.config.types import OWN_CODE
from multigpu_cli.data.class_weights import read_labels
from multigpu_cli.data.collate import (
    PAIR,
    VOID,
    Collate,
    SampleForm,
    count_declared_classes,
    get_tokens,
    to_pair,
    to_tensors,
    unwrap_dataset,
)
from multigpu_cli.data.mixture import MixedSource
from multigpu_cli.data.order import EVAL_EPOCH, split_by_sample
from multigpu_cli.data.source import SPLITS, DataSource, MaterializedIterable, wrap_unlabeled
from multigpu_cli.distributed.processes import say_before_run
from multigpu_cli.errors import RequestError
from multigpu_cli.planning.batch import make_key
from multigpu_cli.runtime import factories

if TYPE_CHECKING:
    from multigpu_cli.data.fetcher import SeededDataset

_MOST_SCANNED = 100_000
_MOMENT, _INTERVAL = 1.0, 10.0  # seconds of reading until the user is told, and told again

Split = Dataset[Any] | None
Moved = Callable[[], None]  # called as samples are read, so that the watchdog sees progress


def infer_source(
    train: Dataset[Any], val: Split, test: Split, seed: int, form: SampleForm, moved: Moved = lambda: None
) -> DataSource:
    """A DataSource of the splits, with shapes and classes inferred from the samples, whose transforms are seeded."""
    from multigpu_cli.data.fetcher import SeededDataset  # late: built-in datasets name their shapes

    samples = SeededDataset(train, seed)
    one = [samples[EVAL_EPOCH, 0]]
    inputs, targets = Collate(train, form)(one)  # a batch, since a collate_fn may add what a sample lacks
    parts = [part.tensors for part in (train, val, test) if isinstance(part, TensorDataset)]
    labeled = [to_pair(part, "a sample", form) for part in parts if len(part) > (form.inputs or 1)]
    is_iterable = isinstance(unwrap_dataset(train), MaterializedIterable)
    return DataSource(
        train=train,
        val=val,
        test=test,
        input_shape=tuple(getattr(inputs, "shape", (0,)))[1:],
        num_classes=_infer_vocabulary_size(labeled, 2)
        or (_count_classes(samples, form, moved) if isinstance(targets, Tensor) else count_declared_classes(train)),
        num_outputs=int(torch.Size(getattr(targets, "shape", (1,))[1:]).numel()),
        note="an iterable dataset, read once with its randomness: " if is_iterable else "",
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
        if form.ignored is not None:
            return _count_in_mask(labels, form.ignored)
        return 0 if labels.is_floating_point() or labels.ndim != 1 else int(labels.max()) + 1

    def needed(index: int) -> int:
        inputs, label = to_pair(samples[EVAL_EPOCH, index][1], f"sample {index}", form)
        return _count_needed(inputs, label) if form.ignored is None else _count_in_mask(label, form.ignored)

    if not (most := needed(0)):
        return 0
    count, listed = len(dataset), read_labels(dataset, form)  # type: ignore[arg-type]
    few = {index * (count - 1) // 15 for index in range(16)}
    if listed is not None and all(needed(index) == _count_needed(None, listed[index]) for index in few):
        return 0 if listed.double().frac().any() else _count_needed(None, listed.max())
    if form.classes is not None:
        return form.classes
    if count > _MOST_SCANNED:
        problem = f"--data: {count} samples are too many to infer the number of classes from"
        raise RequestError(problem, remedy="give the dataset an attribute num_classes")
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


def _count_in_mask(mask: Any, ignored: int) -> int:
    """How many classes the pixels of a mask call for; 0 if it is no mask of class numbers."""
    if not isinstance(mask, Tensor) or mask.is_floating_point() or mask.ndim < 2:
        return 0
    return max(1, int(mask.long().masked_fill(mask.long() == ignored, 0).max()) + 1)


def _infer_vocabulary_size(pairs: Sequence[Sequence[Any]], axes: int) -> int:
    """The vocabulary size, if samples, of so many axes, are tokens with the next tokens as targets; else 0."""
    for pair in pairs:
        if len(pair) != 2 or not all(isinstance(each, Tensor) and each.dtype == torch.int64 for each in pair):
            return 0
        if pair[0].shape != pair[1].shape or pair[0].ndim < axes:
            return 0
    return max((int(each.max()) + 1 for pair in pairs for each in pair), default=0)


Infer = Callable[..., DataSource]  # of train, val and test
_MODEL = ModelConfig()  # for datasets that do not depend on the model


def load_data_source(
    config: DataConfig, seed: int, form: SampleForm = PAIR, *, model: ModelConfig = _MODEL, moved: Moved = lambda: None
) -> DataSource:
    """Load the dataset that --data names: a built-in one, or the user's own.

    A user's factory is called once per split with those arguments that it names among `split` (train, val, test),
    `data_dir`, `mode`, `seed` and the data.args; it returns a map-style Dataset or None. A factory without a `split`
    parameter, or with `split` among the data.args, returns a single dataset, which is divided by seed, 80/10/10. Arrays
    (X, y) count as a dataset. `data.args.new` are the arguments for the samples to predict. Conversations depend
    on the model's folder, and on whether it is compiled. `moved` is called as samples are read to count the classes.
    """
    factory = factories.find_factory(config.name, DATASETS, flag="--data")
    call = partial(factories.call_factory, factory, where="data")
    offered: dict[str, Any] = {"data_dir": config.dir, "mode": config.mode, "seed": seed}
    if config.name in DATASETS:
        offered |= {"model_dir": model.dir, "max_length": config.max_length, "packing": config.packing}
        offered |= {"compiled": model.compile != "off", "form": form, "moved": moved}
    if config.name == "mixture":
        offered |= {"shuffle_block": config.shuffle_block, "shuffle_window": config.shuffle_window}
        alone = partial(load_data_source, seed=seed, form=replace(form, classes=None), model=model, moved=moved)
        offered["mix"] = [_load_mixed(config, entry, alone) for entry in config.mix]
    parameters, args = inspect.signature(factory).parameters, dict(config.args)
    new = None if "new" in parameters else args.pop("new", None)
    infer = partial(infer_source, seed=seed, form=form, moved=moved)
    if "split" in parameters and "split" not in args:
        source = infer(**_load_splits(call, offered, args, config.name, seed))
    elif isinstance(found := call(offered, args), DataSource):
        if new is not None:
            remedy = "leave it out; new samples are for --data csv and for a dataset of your own, MODULE:FUNCTION"
            raise RequestError(f"data.args.new: --data {config.name} takes no new samples", remedy=remedy)
        source = replace(found, form=form)
    else:
        source = _split_by_seed(_dataset(found, config.name, seed), seed, infer)
    if new is not None:
        source = _add_new(source, new, call, offered, args, config.name, seed)
    if len(source.train) == 0:  # type: ignore[arg-type]
        problem = f"--data {config.name}: the training set is empty"
        raise RequestError(problem, remedy="use more samples, or a smaller share for validation and test")
    for split in ("train", "val", "test", "new"):
        _check_finite(getattr(source, split), f"--data {config.name}, split {split}")
    return source


def _load_mixed(config: DataConfig, entry: Mapping[str, Any], load: Callable[[DataConfig], DataSource]) -> MixedSource:
    """One dataset of data.mix, loaded as it would be alone."""
    own = replace(config, name=entry["data"], dir=entry["data_dir"], args=entry["args"], mix=())
    if own.name == "mixture":
        raise RequestError("data.mix: mixtures can't be nested", remedy="one list of all datasets")
    return MixedSource(f"{own.name} {own.dir}" if own.dir else own.name, load(own), entry["weight"])


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
            problem = f"{where}: the {kind} of sample {sample} contains NaN or infinity"
            raise RequestError(problem, remedy="leave such samples out, or replace the values (torch.nan_to_num)")


def _load_splits(
    call: Callable[..., Any], offered: Mapping[str, Any], args: dict[str, Any], name: str, seed: int
) -> dict[str, Any]:
    """The dataset of each split, of a factory that is called once per split."""
    splits = {}
    for number, split in enumerate(SPLITS):
        found = call({**offered, "split": split}, args)
        splits[split] = None if found is None else _dataset(found, f"{name}, split {split}", make_key(seed, number))
    if splits["train"] is None:
        problem = f"--data {name}: the factory returned None for split='train'"
        raise RequestError(problem, remedy="return a dataset; only val and test may be None")
    return splits


def _add_new(
    source: DataSource, new: Any, call: Callable[..., Any], offered: Mapping[str, Any], args: dict[str, Any],
    name: str, seed: int,
) -> DataSource:  # fmt: skip
    """The source with the samples to predict, by data.args.new.

    A mapping has the arguments that differ for them; `module:function` is a factory of their own, which takes what is
    offered; a .npz or .npy file has them as X, or as its only array.
    """
    if isinstance(new, dict):
        found = call({**offered, "split": "test"}, args | new)
    elif isinstance(new, str) and new.endswith((".npz", ".npy")):
        found = _read_array(Path(offered["data_dir"] or ".", new), Path(new))
    elif isinstance(new, str) and OWN_CODE.fullmatch(new):
        found = factories.call_factory(factories.find_factory(new, {}, flag="data.new"), offered, {}, where="data")
    else:
        raise RequestError(
            f"data.args.new: {name} has no new samples for {new!r}",
            remedy="the arguments that differ for them, as --set 'data.new={path: new.csv}'; a function of their own, "
            "--set data.new=MODULE:FUNCTION; or a .npz file with X",
        )
    alone = TensorDataset(to_tensors(found)) if _holds_numbers(found) else _dataset(found, name, seed)
    return replace(source, new=wrap_unlabeled(alone, source.train, source.form) or alone)


def _read_array(*places: Path) -> Any:
    path = next((each for each in places if each.is_file()), places[-1])
    refuse_special_file(path)
    try:
        with path.open("rb") as file:  # NumPy leaves a damaged one open
            found = np.load(file, allow_pickle=False)
            return found if isinstance(found, ndarray) else found["X"]
    except (KeyError, ValueError, OSError, BadZipFile) as error:
        raise RequestError(f"data.args.new: {path}: {error}", remedy="np.savez('new.npz', X=…)") from error


def _split_by_seed(dataset: Dataset[Any], seed: int, infer: Infer) -> DataSource:
    parts = split_by_sample(len(dataset), (0.1, 0.1), seed)  # type: ignore[arg-type]
    if isinstance(dataset, TensorDataset):
        return infer(*(TensorDataset(*(tensor[part] for tensor in dataset.tensors)) for part in parts))
    numbers = (array("q", part.numpy().tobytes()) for part in parts)  # 8 bytes each, read as numbers of Python
    return infer(*(Subset(dataset, part) for part in numbers))


def _dataset(found: Any, name: str, seed: int) -> Dataset[Any]:
    if isinstance(found, IterableDataset):
        return MaterializedIterable(found, name, seed)
    if (arrays := _arrays(found)) is not None:
        inputs, targets = arrays
        return TensorDataset(inputs, targets if targets.is_floating_point() else targets.long())
    if not (hasattr(found, "__getitem__") and hasattr(found, "__len__")):
        raise RequestError(
            f"--data {name}: the factory returned an object of type {type(found).__name__}",
            remedy="return a map-style dataset: an object with __len__ and __getitem__(index) → (input, target), "
            "or an IterableDataset that ends",
        )
    if len(found) == 0:
        raise RequestError(f"--data {name}: the dataset is empty", remedy="return None if there is no such split")
    return found  # type: ignore[no-any-return]


FROM_MODEL = "from-model"  # the task of networks that compute their own loss


def uses_environments(config: Config) -> bool:
    """Whether a request names environments rather than a dataset."""
    return config.task.name in ACTORS or names_environments(config)


SEGMENTATION = "segmentation"  # the task whose targets are masks


def choose_form(inputs: int | None, task: str | None, args: Mapping[str, Any] = MappingProxyType({})) -> SampleForm:
    """What of a sample are inputs: by data.inputs, and by what the task, with its arguments, is to do with them.

    A task of the user's own may need no targets; from-model hands a dict to the network as it is.
    """
    own, whole = task is not None and ":" in task, task == FROM_MODEL
    ignored = args.get("ignore_index", VOID) if task == SEGMENTATION else None
    if not isinstance(ignored, int | None):
        raise RequestError(f"task.args.ignore_index: {ignored!r}", remedy="a whole number")
    return SampleForm(inputs, needs_target=not own and not whole, keeps_mappings=whole, ignored=ignored)


def open_data(config: Config, moved: Moved = lambda: None, classes: int | None = None) -> DataSource:
    """Load the dataset, or probe the environments, that --data names; `moved` is called as samples are read.

    `classes` is their number as an earlier command counted it in these samples, which are not counted again then.
    """
    if not uses_environments(config):
        form = replace(choose_form(config.data.inputs, config.task.name, config.task.args), classes=classes)
        source = load_data_source(config.data, config.reproducibility.seed, form, model=config.model, moved=moved)
        has_labels = (config.task.name or source.task) == "classification"  # which are checked as they are read
        return replace(source, form=replace(source.form, classes=source.num_classes if has_labels else None))
    probed: DataSource = load(next(iter(ACTORS.values())))(config)
    return probed


def check_has_samples(config: Config, what: str) -> None:
    """Refuse environments where `what` needs the samples of a dataset."""
    if uses_environments(config):
        raise RequestError(
            f"{what} needs the samples of a dataset, and --data {config.data.name} names environments",
            remedy="another --data; train, evaluate, status, report and verify support environments",
        )


def find_data_factory(config: Config) -> Callable[..., Any]:
    """The factory that --data names."""
    if not uses_environments(config):
        return factories.find_factory(config.data.name, DATASETS, flag="--data")
    from multigpu_cli.environments.base import find_group_factory  # late: not for datasets

    return find_group_factory(config.data.name)[0]
