"""`DataSource`: the splits of a dataset, its transforms, and what model and task must know of it."""

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
    from multigpu_cli.data.vocabulary import Vocabulary


def to_float(inputs: Tensor) -> Tensor:
    """What happens to a batch where a dataset asks for nothing else: uint8 becomes 0…1, the rest stays."""
    return inputs.float() / 255 if inputs.dtype == torch.uint8 else inputs


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """How samples come to the device where they are fetched one by one.

    Attributes:
        pin_memory: through page-locked host memory; it has an effect with a GPU only.
        prefetch: batches that each loader process keeps ready; None takes torch's own number.
    """

    pin_memory: bool = True
    prefetch: int | None = None


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """A dataset, split and ready to train on.

    A split is a map-style `torch.utils.data.Dataset` of (input, target), or whatever `form` says. A `TensorDataset`
    (inputs (n, …), targets (n,)) is held in memory and indexed by whole batches; anything else is fetched one by one,
    by loader processes.

    Attributes:
        train, val, test: the splits; None where there is none.
        new: samples whose targets nobody knows, and of which those that are there mean nothing: for predictions alone.
        input_shape: shape of one sample as the model meets it (after `prepare`).
        num_classes: how many classes; 0 where targets are no classes.
        num_outputs: how many numbers a target holds that is no class.
        class_names: one name a class, or empty.
        prepare: whole batch on its device, stored dtype → what the model meets (normalising, channel mode).
        augment: whole stored batch and its random numbers → augmented batch; before `prepare`, in training only.
        target_scale: mean and deviation of the training targets, where they are numbers of any size.
        vocabulary: between text and tokens, where samples are text.
        note: what is special about the samples, for the plan.
        order: the user's own order of training samples; None shuffles them by seed and epoch.
        loader_options: how samples come to the device.
        form: what of a sample are inputs, and what targets.
        model_kwargs: what else a network's factory may ask for.
        fixed_batch_sizes: samples of a micro-batch and of a global batch, where the user's settings don't say.
        epochs: how many there are, where --epochs does not say.
        transform_signature: a mark of what else was learned from the training part and went into the samples.
        model, task: what suits this dataset where the user names none.
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
    note: str = ""
    transform_signature: str = ""
    new: Dataset[Any] | None = None
    order: SampleOrder | None = None
    loader_options: LoaderOptions = LoaderOptions()
    form: SampleForm = PAIR
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)
    fixed_batch_sizes: tuple[int, int] | None = None
    epochs: int | None = None
    model: str = "mlp"
    task: str = "classification"

    @property
    def num_train_samples(self) -> int:
        """How many samples an epoch of training has."""
        return len(self.train if self.order is None else self.order)  # type: ignore[arg-type]

    def signature(self) -> str:
        """A mark of what the training part has taught: classes, tokens, scales. Weights mean nothing without these."""
        scale = repr(self.prepare) if is_dataclass(self.prepare) else ""
        tokens = self.vocabulary.serialize() if self.vocabulary else ""
        numbers = f"{self.num_classes} {scale} {self.target_scale}"
        rough = re.sub(
            r"\d+\.\d+(e[-+]\d+)?", lambda found: f"{float(found[0]):.3g}", numbers
        )  # machines round differently
        return sha256(repr((rough, self.class_names, tokens, self.transform_signature)).encode()).hexdigest()[:16]
