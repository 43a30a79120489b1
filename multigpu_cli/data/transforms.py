"""What happens to whole batches on their device: augmentation, the dataset's own preparation, and mixing."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from multigpu_cli.capabilities import TRANSFORMS, load
from multigpu_cli.config.schema import DataConfig
from multigpu_cli.data.collate import describe_shapes, to_device
from multigpu_cli.data.order import KeyedRandom
from multigpu_cli.data.pixels import random_resized_crop
from multigpu_cli.data.source import DataSource
from multigpu_cli.errors import RequestError
from multigpu_cli.runtime.factories import find_factory


class BatchTransforms:
    """The transforms of a split's batches.

    Args:
        config: what the settings ask for, beside the dataset's own augmentation.
        source: the dataset's own transforms.
        seed: the run's seed.
        device: where batches are.
        training: it is the training split; the settings are for its samples alone.

    Raises:
        RequestError: there are no classes to mix, or no torchvision for data.rand_augment.
    """

    def __init__(
        self, config: DataConfig, source: DataSource, seed: int, device: torch.device, *, training: bool
    ) -> None:
        self._prepare, self._seed, self._device = source.prepare, seed, device
        self._augments: list[Callable[[Tensor, KeyedRandom], Tensor]] = [source.augment] if source.augment else []
        smallest = config.random_resized_crop if training else None
        self._needs_images = smallest is not None
        if smallest is not None:
            self._augments.append(partial(random_resized_crop, smallest=smallest))
        self._rand_augment = None
        if training and config.rand_augment is not None:
            name = str(config.rand_augment)
            found = find_factory(name, {name: TRANSFORMS["rand_augment"]}, flag="data.rand_augment")
            self._rand_augment = found(config.rand_augment)
        self._mixer = None
        if training and (config.mixup or config.cutmix):
            self._mixer = load(TRANSFORMS["mix"])(config.mixup, config.cutmix, source.num_classes)

    def evaluate(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """A batch as it is evaluated; one of the training split, the first of a run, must fit the settings.

        Raises:
            RequestError: its samples can't be cropped, augmented or mixed.
        """
        if self._needs_images and not (isinstance(inputs, Tensor) and inputs.ndim == 4):
            raise RequestError(
                f"data.random_resized_crop: inputs are {describe_shapes(inputs)}",
                remedy="images (channels, height, width)",
            )
        if self._rand_augment:
            self._rand_augment.check(inputs)
        inputs = self._to_model_input(inputs)
        if self._mixer:
            self._mixer.check(inputs, targets)
        return inputs, targets

    def train(self, inputs: Any, targets: Any, keys: Tensor, epoch: int, micro_batch: int) -> tuple[Any, Any]:
        """A batch that is trained on.

        Args:
            keys: (n,) int64 on the CPU, by which random numbers are drawn.
            micro_batch: samples of a micro-batch; several may have been joined.

        Raises:
            RequestError: samples can't be mixed.
        """
        if not self._augments and not self._rand_augment and not self._mixer:
            return self._to_model_input(inputs), targets
        draws = KeyedRandom(self._seed, epoch, to_device(keys, self._device))
        if isinstance(inputs, Tensor):
            for augment in self._augments:
                inputs = augment(inputs, draws)
            if self._rand_augment:
                inputs = self._rand_augment(inputs, KeyedRandom(self._seed, epoch, keys))
        inputs = self._to_model_input(inputs)
        return self._mixer(inputs, targets, draws, micro_batch) if self._mixer else (inputs, targets)

    def _to_model_input(self, inputs: Any) -> Any:
        return self._prepare(inputs) if isinstance(inputs, Tensor) else inputs
