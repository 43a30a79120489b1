"""The user's model, data, loss and optimizer: checked, and turned into the engine's objects and settings."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

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

from multigpu_cli.api.from_objects import FromObjects
from multigpu_cli.api.settings import MultiGPUConfig, TrainingMode
from multigpu_cli.data.collate import Collate, SampleForm, count_declared_classes, get_tokens
from multigpu_cli.data.fetcher import SeededDataset
from multigpu_cli.data.load import SEGMENTATION, choose_form, infer_source
from multigpu_cli.data.order import EVAL_EPOCH, SampleOrder
from multigpu_cli.data.source import SPLITS, DataSource, MaterializedIterable
from multigpu_cli.errors import RequestError
from multigpu_cli.models.build import refuse_torchscript
from multigpu_cli.optimizers.build import OWN_LOOP
from multigpu_cli.planning.batch import make_key
from multigpu_cli.runtime.seeding import seed_host
from multigpu_cli.tasks.base import Loss


@dataclass(frozen=True)
class UserInputs:
    """The user's model, data, loss and optimizer, as the caller passed them."""

    model: nn.Module
    train: Dataset[Any]
    val: Dataset[Any] | None = None
    test: Dataset[Any] | None = None
    criterion: Loss | None = None
    optimizer: torch.optim.Optimizer | None = None
    scheduler: LRScheduler | None = None
    scheduler_step: str | None = None
    order: SampleOrder | None = None

    def check(self, seed: int) -> "UserInputs":
        """Check all of them; returns the same, with IterableDatasets read into indexed datasets."""
        _check(self)
        splits = {name: index_stream(getattr(self, name), seed, name) for name in SPLITS}
        for name, dataset in splits.items():
            if dataset is None and name != "train":
                continue
            if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
                problem = f"{name} dataset: a {type(dataset).__name__} is not a map-style dataset"
                raise RequestError(problem, remedy="__len__ and __getitem__(index) → (input, target)")
            if len(dataset) == 0:
                raise RequestError(f"{name} dataset: it is empty")
        return replace(self, **splits)

    def factories(self, config: MultiGPUConfig) -> FromObjects:
        """The objects that the engine trains with."""
        task, form = config.settings.get("task"), _choose_form(config)
        inputs, targets = self._first_batch(form, config.seed)
        criterion = self.criterion or (None if task else nn.CrossEntropyLoss())
        source = DataSource(
            train=self.train,
            val=self.val,
            test=self.test,
            input_shape=tuple(getattr(inputs, "shape", (0,)))[1:],
            num_classes=0 if criterion else self._classes(task, inputs, form, config.seed),
            num_outputs=prod(getattr(targets, "shape", (1,))[1:]),
            prepare=nn.Identity(),
            order=self.order,
            loader_options=config.loader_options,
            form=form,
            task=getattr(criterion, "__name__", type(criterion).__name__),
        )
        return FromObjects(
            source=source,
            model=unwrap_model(self.model),
            criterion=criterion,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scheduler_interval=self.scheduler_step,
            ddp=config.ddp,
        )

    def settings(self, config: MultiGPUConfig) -> MultiGPUConfig:
        """Return the settings with the optimizer's learning rate, and with a task if there is no criterion."""
        more = dict(config.settings)
        if self.optimizer is not None:
            if TrainingMode.named(config.training_mode) is TrainingMode.FULLY_SHARDED_DATA_PARALLEL:
                reason = "it has full weights, and each process only some rows"
                remedy = "settings={'optimizer': 'adamw'} or 'sgd', without an optimizer; or strategy='ddp'"
                raise RequestError(f"your own optimizer can't be used with fsdp: {reason}", remedy=remedy)
            own = {"base_lr", "optimizer", "optimizer.args", "weight_decay", "schedule", "warmup_epochs"} & more.keys()
            if own or config.learning_rate is not None:
                problem = f"{min(own) if own else 'learning_rate'} can't be used with your own optimizer"
                raise RequestError(problem, remedy="set it in the optimizer, or in the scheduler")
            group = self.optimizer.param_groups[0]
            more |= {"schedule": "constant", "warmup_epochs": 0.0}
            config = replace(config, learning_rate=float(group.get("initial_lr", group["lr"])))
        if self.criterion is None and "task" not in more:
            task = _infer_task(*self._first_batch(_choose_form(config), config.seed))
            more |= {"task": task} if task else {}
        return replace(config, settings=more)

    def _first_batch(self, form: SampleForm, seed: int) -> tuple[Any, Any]:
        """A batch of one sample."""
        return Collate(self.train, form)([SeededDataset(self.train, seed)[EVAL_EPOCH, 0]])

    def _classes(self, task: str | None, inputs: Any, form: SampleForm, seed: int) -> int:
        """Return the number of classes, or of tokens, for a task chosen by name; 0 if it needs no such number."""
        if declared := count_declared_classes(self.train):
            return declared
        if task == "language-model":
            return max(2, int(get_tokens(inputs).max()) + 1)
        splits = (self.train, self.val, self.test)
        return infer_source(*splits, seed, form).num_classes if task in ("classification", SEGMENTATION) else 0

    def names(self) -> dict[str, str]:
        """The names of model and data in the run folder: their classes."""
        dataset = self.train.dataset if isinstance(self.train, CollatedDataset) else self.train
        return {"model": _class_name(unwrap_model(self.model)), "data": _class_name(dataset)}


def refuse_forgotten_scheduler(optimizer: Any, scheduler: LRScheduler | None) -> None:
    """Refuse an optimizer whose rate a scheduler has set that is not passed: the rate would stay at its first one.

    `initial_lr` alone also stands in an optimizer that has loaded the state of an earlier training; that its `step` is
    wrapped shows that a scheduler was made for this very object.
    """
    groups, step = getattr(optimizer, "param_groups", []), getattr(optimizer, "step", None)
    if scheduler is None and hasattr(step, "_wrapped_by_lr_sched") and any("initial_lr" in each for each in groups):
        problem = f"optimizer: a scheduler was made for it but not passed: the rate would stay at {groups[0]['lr']:.4g}"
        remedy = "scheduler=…; or, for that rate, group.pop('initial_lr') of each group in optimizer.param_groups"
        raise RequestError(problem, remedy=remedy)


def _choose_form(config: MultiGPUConfig) -> SampleForm:
    given = config.settings
    return choose_form(given.get("data.inputs"), given.get("task"), given.get("task.args", {}))


def unwrap_model(model: nn.Module) -> nn.Module:
    """The module inside of DataParallel or DistributedDataParallel."""
    return model.module if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel) else model


def _infer_task(inputs: Any, targets: Any) -> str | None:
    """regression for real numbers, language-model for (n, t) targets that are the next tokens, None for classes."""
    if not isinstance(targets, Tensor):
        problem = f"criterion: it is required for targets of type {type(targets).__name__}"
        remedy = 'criterion=…, or settings={"task": "from-model"} for a model that returns its loss'
        raise RequestError(problem, remedy=remedy)
    if targets.is_floating_point():
        return "regression"
    tokens = get_tokens(inputs)
    same = isinstance(tokens, Tensor) and tokens.dtype == targets.dtype and tokens.shape == targets.shape
    return "language-model" if same and targets.ndim == 2 else None


def _check(inputs: UserInputs) -> None:
    if not isinstance(inputs.model, nn.Module):
        raise RequestError(f"model: a {type(inputs.model).__name__} is not an nn.Module")
    refuse_torchscript(inputs.model, "model: it is")
    if any(hasattr(p, "device_mesh") for p in inputs.model.parameters()):
        problem = "model: its weights are divided over processes, as fully_shard leaves them"
        raise RequestError(problem, remedy="a new model, with full weights, such as those of best.pt")
    if not any(p.requires_grad for p in inputs.model.parameters()):
        raise RequestError("model: no parameter requires a gradient")
    sampler = getattr(inputs.order, "sampler", None)
    if (ranks := getattr(sampler, "num_replicas", None) or 1) > 1:
        kind = type(sampler).__name__
        problem = f"train_loader: its {kind} divides the samples among {ranks} ranks, as the program does"
        raise RequestError(problem, remedy="give it all samples: num_replicas=1, rank=0")
    if inputs.optimizer is not None and not isinstance(inputs.optimizer, torch.optim.Optimizer):
        raise RequestError(
            f"optimizer: a {type(inputs.optimizer).__name__} is not a torch.optim.Optimizer",
            remedy=OWN_LOOP if isinstance(inputs.optimizer, tuple | list) else "",
        )
    if inputs.criterion is not None and not callable(inputs.criterion):
        raise RequestError(f"criterion: a {type(inputs.criterion).__name__} is not callable with (outputs, targets)")
    if inputs.scheduler_step not in ("epoch", "step", None):
        raise RequestError(f"scheduler_step: {inputs.scheduler_step!r}", remedy="epoch or step")
    if inputs.scheduler is None:
        return
    if inputs.optimizer is None or inputs.scheduler.optimizer is not inputs.optimizer:
        raise RequestError("scheduler: it belongs to another optimizer", remedy="pass it with its own optimizer")
    if isinstance(inputs.scheduler, ReduceLROnPlateau) and (inputs.val is None or inputs.scheduler_step == "step"):
        raise RequestError("scheduler: ReduceLROnPlateau needs a validation loss", remedy="validation data, per epoch")


def _class_name(thing: Any) -> str:
    """module:Class; for a class of the script itself, the script's name is the module."""
    kind = type(thing)
    module = kind.__module__
    if module == "__main__":
        module = Path(getattr(sys.modules[module], "__file__", module)).stem
    return f"{module}:{kind.__qualname__}"


class CollatedDataset(Dataset[Any]):
    """A dataset together with the collate_fn of its DataLoader."""

    def __init__(self, dataset: Dataset[Any], collate_fn: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.collate_fn = dataset, collate_fn

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


@dataclass
class SequentialOrder:
    """Samples in the order of their indices, in every epoch (shuffle=False)."""

    count: int

    def __len__(self) -> int:
        return self.count

    def __call__(self, epoch: int) -> Tensor:
        return torch.arange(self.count)


class SamplerOrder:
    """The order of a user's sampler over `samples` samples: drawn once per epoch on rank 0 and broadcast.

    Before, each rank seeds all generators from (seed, epoch) and calls `set_epoch` if there is one, so that an epoch
    that is repeated after a resume has the same order. The run is planned with the sampler's length at the start. If
    the sampler draws another number of samples, or one that the dataset lacks, every rank raises RequestError.
    """

    def __init__(self, sampler: Sampler[int], seed: int, samples: int) -> None:
        self.sampler, self.seed, self._samples = sampler, seed, samples
        self._length = len(sampler)  # type: ignore[arg-type]
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        return self._length

    def __call__(self, epoch: int) -> Tensor:
        if epoch == self._epoch:
            return self._order
        drawn = self._draw(epoch)
        if dist.is_initialized():
            drawn = drawn.to("cuda" if dist.get_backend() == "nccl" else "cpu")
            dist.broadcast(drawn, src=0)
        number, order = int(drawn[0]), drawn[1:].cpu()
        where = f"train_loader: in epoch {epoch + 1} its {type(self.sampler).__name__} drew"
        if number != self._length:
            problem = f"{where} {number} samples, and the run is planned with {self._length} in each epoch"
            remedy = "draw as many in each epoch, repeating some if need be; or one run per length, by init_from"
            raise RequestError(problem, remedy=remedy)
        if self._length and (last := int(order.max())) >= self._samples:
            raise RequestError(f"{where} sample {last}, and the dataset has {self._samples}, counted from 0")
        self._epoch, self._order = epoch, order
        return order

    def _draw(self, epoch: int) -> Tensor:
        """Return (1 + length,) int64: the number of samples that rank 0 drew, and the first of them; else zeros."""
        number = make_key(self.seed, epoch)
        seed_host(number)
        if isinstance(generator := getattr(self.sampler, "generator", None), torch.Generator):
            generator.manual_seed(number)
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
        drawn = torch.zeros(1 + self._length, dtype=torch.int64)
        if not dist.is_initialized() or dist.get_rank() == 0:
            order = list(self.sampler)
            drawn[0], drawn[1 : 1 + len(order)] = len(order), torch.tensor(order[: self._length])
        return drawn


def from_loader(
    loader: DataLoader[Any], config: MultiGPUConfig
) -> tuple[Dataset[Any], SampleOrder | None, MultiGPUConfig]:
    """Dataset, order of samples (None: shuffled by seed), and the config with the loader's batch size and workers."""
    dataset = with_collate(loader, config.seed)
    if loader.batch_size is None:
        reason = "only batches of single samples are the same on any number of GPUs"
        problem = f"train_loader: a batch_sampler, or batch_size=None, is not supported: {reason}"
        raise RequestError(problem, remedy="DataLoader(dataset, batch_size=…, sampler=…)")
    settings = replace(
        config,
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        num_workers=loader.num_workers,
        pin_memory=config.pin_memory or loader.pin_memory,
        prefetch_factor=loader.prefetch_factor,
    )
    count = len(dataset)  # type: ignore[arg-type]
    stream = isinstance(loader.dataset, IterableDataset)
    return dataset, SequentialOrder(count) if stream else _find_order(loader.sampler, count, config.seed), settings


def with_collate(loader: DataLoader[Any], seed: int, split: str = "train") -> Dataset[Any]:
    """Return the loader's dataset, with the loader's collate_fn unless that is torch's default."""
    if not isinstance(loader, DataLoader):
        raise RequestError(f"{split} loader: a {type(loader).__name__} is no DataLoader", remedy="DataLoader(dataset)")
    dataset, own = index_stream(loader.dataset, seed, split), loader.collate_fn is not default_collate
    return CollatedDataset(dataset, loader.collate_fn) if own else dataset


def index_stream(dataset: Any, seed: int, split: str) -> Any:
    """An IterableDataset is read once, so that its samples have indices; any other dataset is returned as it is."""
    if not isinstance(dataset, IterableDataset):
        return dataset
    name = f"{type(dataset).__name__}, split {split}"
    return MaterializedIterable(dataset, name, make_key(seed, SPLITS.index(split)))


def _find_order(sampler: Sampler[int] | Iterable[Any], count: int, seed: int) -> SampleOrder | None:
    if type(sampler) is DistributedSampler:  # the engine divides the samples among the ranks
        return None if sampler.shuffle else SequentialOrder(count)
    if isinstance(sampler, SequentialSampler):
        return SequentialOrder(count)
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == count:
        return None
    return SamplerOrder(sampler, seed, count)  # type: ignore[arg-type]
