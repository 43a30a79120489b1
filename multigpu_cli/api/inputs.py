"""The user's model, data, loss and optimizer as what the engine takes, and the settings that go with them."""

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import Dataset

from multigpu_cli.api.loaders import SPLITS, CollatedDataset, index_stream
from multigpu_cli.api.settings import MultiGPUConfig
from multigpu_cli.data.data_source import DataSource
from multigpu_cli.data.epoch_order import Order
from multigpu_cli.data.infer_shape import infer_source
from multigpu_cli.data.sample import Collate, count_declared_classes, get_sample
from multigpu_cli.errors import RequestError
from multigpu_cli.run.user_objects import UserObjects
from multigpu_cli.tasks.base import Loss


@dataclass(frozen=True)
class UserInputs:
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

    def check(self, seed: int) -> "UserInputs":
        """The same, with numbers for the samples of streams.

        Raises:
            RequestError: something is not what it should be; says which.
        """
        _check(self)
        splits = {name: index_stream(getattr(self, name), seed, name) for name in SPLITS}
        for name, dataset in splits.items():
            _check_dataset(name, dataset)
        return replace(self, **splits)

    def user_objects(self, config: MultiGPUConfig) -> UserObjects:
        """Live objects for the engine.

        Raises:
            RequestError: samples that nobody can learn from; says which.
        """
        inputs, targets = self._first()
        task = config.settings.get("task")
        criterion = self.criterion or (None if task else nn.CrossEntropyLoss())
        source = DataSource(
            train=self.train,
            val=self.val,
            test=self.test,
            input_shape=tuple(getattr(inputs, "shape", (0,)))[1:],
            num_classes=0 if criterion else self._classes(task, inputs),
            outputs=prod(getattr(targets, "shape", (1,))[1:]),
            prepare=_as_it_is,
            order=self.order,
            loader_options=config.loader_options,
            task=getattr(criterion, "__name__", type(criterion).__name__),
        )
        return UserObjects(
            source, unwrap_model(self.model), criterion, self.optimizer, self.scheduler, self.scheduler_step, config.ddp
        )

    def settings(self, config: MultiGPUConfig) -> MultiGPUConfig:
        """The settings with what these objects say: the optimizer's rate, and the task of those who bring no loss.

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
        if self.criterion is None and "task" not in more and (task := _usual_task(*self._first())):
            more["task"] = task
        return replace(config, settings=more)

    def _first(self) -> tuple[Any, Any]:
        """A batch of one sample."""
        return Collate(self.train)([(0, get_sample(self.train, 0))])

    def _classes(self, task: str | None, inputs: Any) -> int:
        """How many classes a task by name has to know of; of tokens only whether there are any."""
        if told := count_declared_classes(self.train):
            return told
        if task == "language-model":
            return max(2, int(_tokens(inputs).max()) + 1)
        return infer_source(self.train, self.val, self.test).num_classes if task == "classification" else 0

    def names(self) -> dict[str, str]:
        """What model and data are called in the run folder: their classes."""
        dataset: Any = self.train
        while isinstance(dataset, CollatedDataset):
            dataset = dataset.dataset
        return {"model": _class_of(unwrap_model(self.model)), "data": _class_of(dataset)}


def unwrap_model(model: nn.Module) -> nn.Module:
    """The network inside of DataParallel or DistributedDataParallel."""
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    return model.module if isinstance(model, wrappers) else model


def _usual_task(inputs: Any, targets: Any) -> str | None:
    """A regression for real numbers, a language model for (n, t) tokens that follow the inputs'; None for classes."""
    if not isinstance(targets, Tensor):
        raise RequestError(f"criterion: none goes without saying for targets of type {type(targets).__name__}")
    if targets.is_floating_point():
        return "regression"
    tokens = _tokens(inputs)
    alike = isinstance(tokens, Tensor) and tokens.dtype == targets.dtype and tokens.shape == targets.shape
    return "language-model" if alike and targets.ndim == 2 else None


def _tokens(inputs: Any) -> Any:
    return inputs.get("input_ids") if isinstance(inputs, dict) else inputs


def _check(inputs: UserInputs) -> None:
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
