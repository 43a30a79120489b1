"""The user's own model, data, loss and optimizer, in place of those that a configuration names."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from multigpu_cli.checkpoint.snapshot import TrainState
from multigpu_cli.checkpoint.weights import check_fit, extra_state, read_weights
from multigpu_cli.data.data_source import DataSource
from multigpu_cli.errors import RequestError
from multigpu_cli.models.build import adapt_model
from multigpu_cli.optimizers.load_state import StateLoader
from multigpu_cli.runtime.collectives import broadcast_object
from multigpu_cli.runtime.model_call import unbind_call
from multigpu_cli.runtime.raise_on_all_ranks import run_on_main_rank
from multigpu_cli.runtime.world import World
from multigpu_cli.tasks.base import Loss


@dataclass(frozen=True)
class UserObjects:
    """The live objects of a run from Python; the model is trained in place.

    Attributes:
        source: the dataset.
        model: on any device; all ranks start from rank 0's weights.
        criterion: outputs and targets → loss; None: the task that the configuration or the dataset names.
        optimizer: over the model's parameters; None: the configuration's.
        scheduler: of that optimizer; without one the optimizer's rates stay constant.
        scheduler_interval: when the scheduler steps: "epoch" or "step"; None: as what it was made for tells.
        ddp: further arguments of DistributedDataParallel.
    """

    source: DataSource
    model: nn.Module
    criterion: Loss | None = None
    optimizer: torch.optim.Optimizer | None = None
    scheduler: LRScheduler | None = None
    scheduler_interval: str | None = None
    ddp: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        live = (self.model, self.criterion, self.optimizer, self.scheduler)
        return ", ".join(getattr(each, "__name__", type(each).__name__) for each in live if each is not None)

    @property
    def parts_by_name(self) -> tuple[str, ...]:
        """The parts that are built from names in the settings."""
        return (() if self.criterion else ("task",)) + (() if self.optimizer else ("optimizer", "schedule"))

    def explain_rate(self, interval: str) -> str:
        """Where the learning rate comes from, for the plan."""
        scheduler = f", moved by {type(self.scheduler).__name__} after each {interval}"
        return f"that of your {type(self.optimizer).__name__}{scheduler if self.scheduler else ''}"

    def prepare_optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        """The user's optimizer, with its state on the model's device.

        Raises:
            RequestError: it does not hold exactly the trainable parameters, or it is LBFGS.
        """
        if self.optimizer is None:
            return None
        if isinstance(self.optimizer, torch.optim.LBFGS):
            raise RequestError(
                "optimizer: LBFGS is not supported: it evaluates the loss several times per step",
                remedy="another optimizer",
            )
        moved = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        left = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in moved]
        strange = moved - {id(p) for p in model.parameters()}
        if left or strange:
            what = f"does not move {', '.join(left[:4])}" if left else f"moves {len(strange)} parameter(s) not its own"
            raise RequestError(
                f"optimizer: it {what}",
                remedy="build it from this model's parameters(), and freeze others with requires_grad_(False)",
            )
        StateLoader(self.optimizer)  # for this load, and for that of a checkpoint
        if self.optimizer.state:
            self.optimizer.load_state_dict(self.optimizer.state_dict())  # moves it to the parameters' device
        return self.optimizer

    def step_scheduler(self, state: TrainState, step: int, every: int) -> None:
        """Step the scheduler up to its position before optimizer step `step`, counted from 0: once in `every`."""
        if self.scheduler is None:
            return
        wanted = step // every
        with warnings.catch_warnings():
            # after a resume the optimizer has stepped, in the attempt before
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            while state.progress.scheduled < wanted:
                if isinstance(self.scheduler, ReduceLROnPlateau):
                    self.scheduler.step(state.progress.last["val_loss"])
                else:
                    self.scheduler.step()
                state.progress.scheduled += 1

    def load_weights(self, folder: str, world: World) -> None:
        """Load the weights of a completed run into the model."""
        model = adapt_model(self.model).to(world.device)
        files = [Path(folder, name) for name in ("best.pt", "last.pt")]
        state = run_on_main_rank(
            world, lambda: read_weights(next((file for file in files if file.is_file()), files[0]))
        )
        check_fit(model, state, folder)
        model.load_state_dict(state)
        unbind_call(self.model)


def broadcast_weights(model: nn.Module, world: World) -> None:
    """Give all ranks rank 0's weights: each may have drawn other random numbers."""
    if world.size > 1:
        state = model.state_dict()
        for value in state.values():
            if isinstance(value, Tensor):
                dist.broadcast(value, src=0)
        if extra := extra_state(state):
            state.update(broadcast_object(world, extra))
            model.load_state_dict(state)
