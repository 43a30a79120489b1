"""`DataSource`: the splits of a dataset, its transforms, and the facts that model and task need."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from hashlib import sha256
from itertools import islice
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from multigpu_cli.config.types import choice
from multigpu_cli.data.collate import PAIR, Collate, SampleForm, get_sample, unwrap_dataset
from multigpu_cli.data.order import KeyedRandom, SampleOrder
from multigpu_cli.errors import RequestError
from multigpu_cli.planning.batch import make_key
from multigpu_cli.runtime.model_call import TARGETS
from multigpu_cli.runtime.seeding import seed_everything

SPLITS = ("train", "val", "test")
FEW = 20  # whole-number targets with at most this many distinct values are classes, unless declared otherwise
Kind = Annotated[str, choice("auto", "classification", "regression")]  # what data.kind says of the targets


def to_float(inputs: Tensor) -> Tensor:
    """The default `prepare`: uint8 is scaled to 0…1, other types are unchanged."""
    return inputs.float() / 255 if inputs.dtype == torch.uint8 else inputs


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """Options of the DataLoader, where samples are fetched one by one."""

    pin_memory: bool = True  # copy through page-locked host memory; has no effect without a GPU
    prefetch: int | None = None  # batches that each loader process prepares ahead; None uses torch's default


class Codec:
    """What makes samples of a dataset's own texts or rows; this one, of samples that are numbers already."""

    record: Mapping[str, str] = MappingProxyType({})  # what checkpoints say of a pretrained tokenizer that makes them

    def serialize(self) -> str:
        """Return the codec as text, from which it can be rebuilt; "" if rebuilding it needs the data."""
        return ""


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """A dataset, split and ready to train on.

    A split is a map-style `torch.utils.data.Dataset` of (input, target), or as `form` says. A `TensorDataset` (inputs
    (n, …), targets (n,)) is kept in memory and indexed by whole batches; loader processes fetch any other by sample.
    """

    train: Dataset[Any]
    val: Dataset[Any] | None = None
    test: Dataset[Any] | None = None
    input_shape: tuple[int, ...]  # shape of one sample as the model receives it (after `prepare`)
    num_classes: int  # 0 if targets are not classes
    num_outputs: int = 1  # number of values in a target that is not a class
    class_names: tuple[str, ...] = ()
    prepare: Callable[[Tensor], Tensor] = to_float  # a stored batch on its device → the model's input
    augment: Callable[[Tensor, KeyedRandom], Tensor] | None = None  # a stored batch, before `prepare`; in training only
    target_scale: tuple[float, float] | None = None  # mean and deviation of the training targets of a regression
    codec: Codec = Codec()  # made the samples: a vocabulary of texts, a tokenizer, or the features of a table
    noun: str = "samples"  # or packs, of texts told apart by their position ids; or pairs: a chosen, a rejected answer
    note: str = ""  # a property of the samples that the plan shows
    warnings: tuple[str, ...] = ()  # what looks wrong in the data but may be intended
    transform_signature: str = ""  # of transforms that were fitted to the training split and applied to the samples
    new: Dataset[Any] | None = None  # unlabeled samples, for predictions only; their targets are placeholders
    order: SampleOrder | None = None  # the user's own order of training samples; None shuffles them by seed and epoch
    order_has_repeats: bool = False  # it numbers a sample that comes again beyond the dataset's end, by its length
    shuffle_block: int | None = None  # neighbours shuffled as a block, where data.shuffle_block is not set; BlockOrder
    loader_options: LoaderOptions = LoaderOptions()
    form: SampleForm = PAIR  # which parts of a sample are inputs, and which are targets
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)  # further arguments that a model's factory may name
    fixed_batch_sizes: tuple[int, int] | None = None  # of a micro-batch and a global batch, if the data defines them
    epochs: int | None = None  # if the data defines them
    model: str = "mlp"  # the default for this dataset
    task: str = "classification"  # likewise

    @property
    def num_train_samples(self) -> int:
        """The number of samples in an epoch of training."""
        return len(self.train if self.order is None else self.order)  # type: ignore[arg-type]

    def signature(self) -> str:
        """A checksum of what was fitted to the training split (classes, tokens, scales), on which weights depend."""
        scale = repr(self.prepare) if is_dataclass(self.prepare) else ""
        numbers = f"{self.num_classes} {scale} {self.target_scale}"
        # three digits, since machines round differently
        rounded = re.sub(r"\d+\.\d+(e[-+]\d+)?", lambda found: f"{float(found[0]):.3g}", numbers)
        fitted = rounded, self.class_names, self.codec.serialize(), self.transform_signature
        return sha256(repr(fitted).encode()).hexdigest()[:16]


class UnlabeledDataset(Dataset[Any]):
    """A dataset of inputs only, as its collate_fn accepts them; `target` stands for that of each sample."""

    def __init__(self, dataset: Dataset[Any], target: Tensor) -> None:
        self.dataset, self.target = dataset, target
        own = getattr(unwrap_dataset(dataset), "collate_fn", None)
        if own is not None:
            self.collate_fn = lambda samples: (own(samples), target.expand(len(samples), *target.shape))

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        item = self.dataset[index]
        if hasattr(self, "collate_fn"):
            return item
        if isinstance(item, Mapping):
            return {**item, TARGETS[0]: self.target}
        return (*item, self.target) if isinstance(item, tuple | list) else (item, self.target)


def check_precision(values: np.ndarray, name: str) -> None:
    """Raise RequestError if float32, in which training computes, loses what tells numbers (n, …) apart.

    That is more than a thousandth of the deviation of some column, as with seconds since 1970.
    """
    rows = values.reshape(len(values), -1).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        lost, spread = np.abs(rows - rows.astype(np.float32)).max(axis=0, initial=0), rows.std(axis=0)
    for column in ((lost > 1e-3 * spread) & (spread > 0)).nonzero()[0][:1]:
        raise RequestError(
            f"{name}: numbers such as {rows[0, column]:.17g} differ by {spread[column]:.3g} and are rounded by "
            f"{lost[column]:.3g} in float32",
            remedy="subtract an offset from the column, such as its first value",
        )


def wrap_unlabeled(dataset: Dataset[Any], train: Dataset[Any], form: SampleForm = PAIR) -> UnlabeledDataset | None:
    """The dataset with placeholder targets; None if it has targets, or if the training samples have none."""
    item, known = get_sample(dataset, 0, "new"), get_sample(train, 0)
    if (own := getattr(unwrap_dataset(dataset), "collate_fn", None)) is not None:
        item, known = own([item]), own([known])
    if _has_target(item, form) or not _has_target(known, form):
        return None
    return UnlabeledDataset(dataset, torch.zeros_like(Collate(train, form)([(0, get_sample(train, 0))]).targets[0]))


def _has_target(item: Any, form: SampleForm) -> bool:
    if isinstance(item, Mapping):
        return any(name in item for name in TARGETS)
    return isinstance(item, tuple | list) and len(item) > (form.inputs or 1)


MOST = 100_000  # samples that are read
_STREAM = 0x57E4  # separates its random numbers from those of other streams


class MaterializedIterable(Dataset[Any]):
    """An IterableDataset, read once to its end, so that its samples have indices.

    Order, resume and exactness then hold as for any dataset. Two limits remain: its random numbers are drawn once, as
    it is read, and not in each epoch; and it must yield the same samples in every process.
    """

    def __init__(self, stream: IterableDataset[Any], name: str, seed: int) -> None:
        seed_everything(make_key(seed, _STREAM))
        self.samples = list(islice(stream, MOST + 1))
        if not self.samples:
            raise RequestError(
                f"--data {name}: the iterable dataset is empty", remedy="return None if there is no such split"
            )
        if len(self.samples) > MOST:
            raise RequestError(
                f"--data {name}: the iterable dataset does not end after {MOST:,} samples",
                remedy="use a map-style dataset (__len__ and __getitem__), which can be resumed and divided exactly",
            )
        for attribute in ("num_classes", "classes", "collate_fn"):
            if hasattr(stream, attribute):
                setattr(self, attribute, getattr(stream, attribute))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]
