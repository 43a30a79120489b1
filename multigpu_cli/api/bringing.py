"""The user's model, data, loss and optimizer as what the engine takes, and the settings that go with them."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
)

from multigpu_cli.api.settings import MultiGPUConfig
from multigpu_cli.data.base import Source
from multigpu_cli.data.sample import Collate, sample_of
from multigpu_cli.data.sampler import Order
from multigpu_cli.errors import RequestError
from multigpu_cli.planning.keys import key
from multigpu_cli.run.brought import Brought
from multigpu_cli.tasks.criterion import Loss


@dataclass(frozen=True)
class Inputs:
    """What somebody trains on and with, before it is settled what a run makes of it."""

    model: nn.Module
    train: Dataset[Any]
    val: Dataset[Any] | None = None
    test: Dataset[Any] | None = None
    criterion: Loss | None = None
    optimizer: torch.optim.Optimizer | None = None
    scheduler: LRScheduler | None = None
    scheduler_step: str = "epoch"
    order: Order | None = None

    def brought(self, config: MultiGPUConfig) -> Brought:
        """Live objects for the engine.

        Raises:
            RequestError: something is not what it should be; says which.
        """
        _check(self)
        for name in ("train", "val", "test"):
            _check_dataset(name, getattr(self, name))
        inputs, targets = Collate(self.train)([(0, sample_of(self.train, 0))])
        source = Source(
            train=self.train,
            val=self.val,
            test=self.test,
            input_shape=tuple(getattr(inputs, "shape", (0,)))[1:],
            num_classes=0,
            outputs=prod(getattr(targets, "shape", (1,))[1:]),
            prepare=_as_it_is,
            order=self.order,
            fetching=config.fetching,
        )
        criterion = self.criterion or (None if "task" in config.settings else _usual_loss(targets))
        return Brought(
            source, unwrapped(self.model), criterion, self.optimizer, self.scheduler, self.scheduler_step, config.ddp
        )

    def settings(self, config: MultiGPUConfig) -> MultiGPUConfig:
        """The settings with what these objects say: names for the run folder, and the optimizer's rate.

        Raises:
            RequestError: a rate is given twice.
        """
        more = dict(config.settings)
        if self.optimizer is not None:
            told = {"base_lr", "optimizer", "optimizer.args", "weight_decay", "schedule", "warmup_epochs"} & more.keys()
            if told or config.learning_rate is not None:
                raise RequestError(
                    f"{min(told) if told else 'learning_rate'} together with an optimizer of your own",
                    remedy="give it to the optimizer, or the scheduler",
                )
            group = self.optimizer.param_groups[0]
            more |= {"schedule": "constant", "warmup_epochs": 0.0}
            config = replace(config, learning_rate=float(group.get("initial_lr", group["lr"])))
        return replace(config, settings=more)

    def names(self) -> dict[str, str]:
        """What model and data are called in the run folder: their classes."""
        dataset: Any = self.train
        while isinstance(dataset, Collated):
            dataset = dataset.dataset
        return {"model": _class_of(unwrapped(self.model)), "data": _class_of(dataset)}


class Collated(Dataset[Any]):
    """A dataset with the collate_fn of somebody's loader."""

    def __init__(self, dataset: Dataset[Any], collate_fn: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.collate_fn = dataset, collate_fn

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


class InOrder:
    """Samples one after the other, in every epoch (shuffle=False)."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __call__(self, epoch: int) -> Tensor:
        return torch.arange(self.count)


class Drawn:
    """The order of somebody's sampler: drawn once for each epoch, on rank 0, which tells the others.

    All generators are seeded from (seed, epoch) before, and `set_epoch` is called where there is one, so that an epoch
    that is begun again after a resume has the same order.
    """

    def __init__(self, sampler: Sampler[int], seed: int) -> None:
        self.sampler, self.seed = sampler, seed
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def __call__(self, epoch: int) -> Tensor:
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._shared(epoch)
        return self._order

    def _shared(self, epoch: int) -> Tensor:
        if not dist.is_initialized():
            return self._drawn(epoch)
        device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
        order = self._drawn(epoch) if dist.get_rank() == 0 else torch.empty(len(self), dtype=torch.int64)
        order = order.to(device)
        dist.broadcast(order, src=0)
        return order.cpu()

    def _drawn(self, epoch: int) -> Tensor:
        number = key(self.seed, epoch)
        random.seed(number)
        numpy.random.seed(number & 0xFFFFFFFF)
        torch.default_generator.manual_seed(number)
        if isinstance(generator := getattr(self.sampler, "generator", None), torch.Generator):
            generator.manual_seed(number)
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
        order = torch.tensor(list(self.sampler), dtype=torch.int64)
        if len(order) != len(self):
            raise RequestError(f"sampler: it says it has {len(self)} samples and drew {len(order)}")
        return order


def from_loader(loader: DataLoader[Any], config: MultiGPUConfig) -> tuple[Dataset[Any], Order | None, MultiGPUConfig]:
    """What a loader says: dataset, order of samples (None: shuffled by seed), and settings: batch size, workers.

    Raises:
        RequestError: batches that somebody else makes up, or a stream.
    """
    dataset = with_collate(loader)
    if loader.batch_size is None:
        raise RequestError(
            "train_loader: a batch_sampler, or none at all, makes up the batches itself; here they are the same on any "
            "number of GPUs only if they are made from single samples",
            remedy="DataLoader(dataset, batch_size=…, sampler=…)",
        )
    settings = replace(
        config,
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        num_workers=loader.num_workers,
        pin_memory=config.pin_memory or loader.pin_memory,
        prefetch_factor=loader.prefetch_factor,
    )
    return dataset, _order(loader.sampler, len(dataset), config.seed), settings  # type: ignore[arg-type]


def with_collate(loader: DataLoader[Any]) -> Dataset[Any]:
    """The loader's dataset, with its collate_fn where that is not torch's own."""
    if isinstance(loader.dataset, IterableDataset):
        raise RequestError("loader: a stream has no numbered samples", remedy="a map-style dataset")
    own = loader.collate_fn is not default_collate
    return Collated(loader.dataset, loader.collate_fn) if own else loader.dataset


def _order(sampler: Sampler[int] | Iterable[Any], count: int, seed: int) -> Order | None:
    if isinstance(sampler, DistributedSampler):  # sharing out is done here
        return None if sampler.shuffle else InOrder(count)
    if isinstance(sampler, SequentialSampler):
        return InOrder(count)
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == count:
        return None
    return Drawn(sampler, seed)  # type: ignore[arg-type]


def unwrapped(model: nn.Module) -> nn.Module:
    """The network inside of DataParallel or DistributedDataParallel."""
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    return model.module if isinstance(model, wrappers) else model


def _usual_loss(targets: Any) -> Loss:
    """Cross-entropy for class numbers, mean squared error for real numbers."""
    if not isinstance(targets, Tensor):
        raise RequestError(f"criterion: none goes without saying for targets of type {type(targets).__name__}")
    return nn.MSELoss() if targets.is_floating_point() else nn.CrossEntropyLoss()


def _check(inputs: Inputs) -> None:
    if not isinstance(inputs.model, nn.Module):
        raise RequestError(f"model: a {type(inputs.model).__name__} is no nn.Module")
    if not any(p.requires_grad for p in inputs.model.parameters()):
        raise RequestError("model: it has no parameter that learns")
    if inputs.optimizer is not None and not isinstance(inputs.optimizer, torch.optim.Optimizer):
        raise RequestError(f"optimizer: a {type(inputs.optimizer).__name__} is no torch.optim.Optimizer")
    if inputs.criterion is not None and not callable(inputs.criterion):
        raise RequestError(f"criterion: a {type(inputs.criterion).__name__} can't be called with (outputs, targets)")
    if inputs.scheduler_step not in ("epoch", "step"):
        raise RequestError(f"scheduler_step: {inputs.scheduler_step!r}", remedy="epoch or step")
    if inputs.scheduler is None:
        return
    if inputs.optimizer is None or inputs.scheduler.optimizer is not inputs.optimizer:
        raise RequestError("scheduler: it is not that of the optimizer that comes with it", remedy="give both")
    if isinstance(inputs.scheduler, ReduceLROnPlateau) and (inputs.val is None or inputs.scheduler_step == "step"):
        raise RequestError("scheduler: ReduceLROnPlateau needs a validation loss", remedy="validation data, per epoch")


def _check_dataset(name: str, dataset: Any) -> None:
    if dataset is None and name != "train":
        return
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise RequestError(
            f"{name} dataset: a {type(dataset).__name__} is no map-style dataset",
            remedy="__len__ and __getitem__(index) → (input, target)",
        )
    if len(dataset) == 0:
        raise RequestError(f"{name} dataset: it is empty")


def _as_it_is(inputs: Tensor) -> Tensor:
    return inputs


def _class_of(thing: Any) -> str:
    """module:Class, with the file's name for a script."""
    kind = type(thing)
    module = kind.__module__
    if module == "__main__":
        import __main__

        module = Path(getattr(__main__, "__file__", "__main__")).stem
    return f"{module}:{kind.__qualname__}"
