"""`DataSource`: the splits of a dataset, its transforms, and the facts that model and task need."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from multigpu_cli.data.collate import PAIR, SampleForm
from multigpu_cli.data.epoch_order import SampleOrder
from multigpu_cli.data.keyed_random import KeyedRandom

if TYPE_CHECKING:
    from multigpu_cli.data.table_features import TableFeatures
    from multigpu_cli.data.vocabulary import Vocabulary


def to_float(inputs: Tensor) -> Tensor:
    """The default `prepare`: uint8 is scaled to 0…1, other types are unchanged."""
    return inputs.float() / 255 if inputs.dtype == torch.uint8 else inputs


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """Options of the DataLoader, where samples are fetched one by one.

    Attributes:
        pin_memory: copy through page-locked host memory; has no effect without a GPU.
        prefetch: batches that each loader process prepares ahead; None uses torch's default.
    """

    pin_memory: bool = True
    prefetch: int | None = None


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """A dataset, split and ready to train on.

    A split is a map-style `torch.utils.data.Dataset` of (input, target), or as `form` says. A `TensorDataset` (inputs
    (n, …), targets (n,)) is kept in memory and indexed by whole batches; any other is fetched sample by sample, by
    loader processes.

    Attributes:
        train, val, test: the splits, or None.
        new: unlabeled samples, for predictions only; their targets are placeholders.
        input_shape: shape of one sample as the model receives it (after `prepare`).
        num_classes: number of classes; 0 if targets are not classes.
        num_outputs: number of values in a target that is not a class.
        class_names: one name per class, or empty.
        prepare: a stored batch on its device → the model's input (normalization, channel mode).
        augment: a stored batch and its random numbers → augmented batch; before `prepare`, in training only.
        target_scale: mean and deviation of the training targets of a regression.
        vocabulary: converts between text and tokens, if samples are text.
        text_model: what checkpoints record of a pretrained model's tokenizer, if it made the tokens.
        table: converts rows of text to features, if samples are rows of a table.
        note: a property of the samples that the plan shows.
        warnings: what looks wrong in the data but may be intended.
        packed: a training sample holds several texts side by side, told apart by their position ids.
        paired: a sample is a chosen and a rejected answer, in rows of their own.
        order: the user's own order of training samples; None shuffles them by seed and epoch.
        order_has_repeats: that order numbers a sample that comes again beyond the dataset's end, by its length.
        shuffle_block: neighbours that are shuffled as a block, where data.shuffle_block says nothing; see BlockOrder.
        loader_options: options of the DataLoader.
        form: which parts of a sample are inputs, and which are targets.
        model_kwargs: further arguments that a model's factory may name.
        fixed_batch_sizes: samples of a micro-batch and of a global batch, if the dataset defines them.
        epochs: number of epochs, if the dataset defines it.
        transform_signature: identifies transforms that were fitted to the training split and applied to the samples.
        model, task: the defaults for this dataset.
    """

    train: Dataset[Any]
    val: Dataset[Any] | None
    test: Dataset[Any] | None
    input_shape: tuple[int, ...]
    num_classes: int
    num_outputs: int = 1
    class_names: tuple[str, ...] = ()
    prepare: Callable[[Tensor], Tensor] = to_float
    augment: Callable[[Tensor, KeyedRandom], Tensor] | None = None
    target_scale: tuple[float, float] | None = None
    vocabulary: "Vocabulary | None" = None
    text_model: Mapping[str, str] = field(default_factory=dict)
    table: "TableFeatures | None" = None
    note: str = ""
    warnings: tuple[str, ...] = ()
    transform_signature: str = ""
    new: Dataset[Any] | None = None
    order: SampleOrder | None = None
    order_has_repeats: bool = False
    shuffle_block: int | None = None
    packed: bool = False
    paired: bool = False
    loader_options: LoaderOptions = LoaderOptions()
    form: SampleForm = PAIR
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)
    fixed_batch_sizes: tuple[int, int] | None = None
    epochs: int | None = None
    model: str = "mlp"
    task: str = "classification"

    @property
    def num_train_samples(self) -> int:
        """The number of samples in an epoch of training."""
        return len(self.train if self.order is None else self.order)  # type: ignore[arg-type]

    def signature(self) -> str:
        """A checksum of what was fitted to the training split (classes, tokens, scales), on which weights depend."""
        scale = repr(self.prepare) if is_dataclass(self.prepare) else ""
        tokens = self.vocabulary.serialize() if self.vocabulary else ""
        numbers = f"{self.num_classes} {scale} {self.target_scale}"
        # three digits, since machines round differently
        rounded = re.sub(r"\d+\.\d+(e[-+]\d+)?", lambda found: f"{float(found[0]):.3g}", numbers)
        return sha256(repr((rounded, self.class_names, tokens, self.transform_signature)).encode()).hexdigest()[:16]
