"""What survives a restart: weights, optimizer, loss scale, averages, progress. What is not here is lost on resume."""

from contextlib import nullcontext
from copy import copy
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from multigpu_cli.checkpoint.initial_weights import WeightMatch
from multigpu_cli.checkpoint.serialize import iterate_tensors
from multigpu_cli.checkpoint.weights import check_fit, extra_state
from multigpu_cli.runtime.precision import Precision


@dataclass
class Progress:
    """How far a run is; everything about data and randomness follows from `step`.

    Attributes:
        step: the place in the schedule: optimizer steps done, and those that a task has left out (PPO's target_kl).
        best: metrics of the best evaluation so far, with its epoch; empty before the first.
        score: that evaluation's score, as the task orders it.
        stale_epochs: evaluations since then.
        train_seconds, startup_seconds: totals over all attempts.
        last: metrics of the newest evaluation of each split, and train_loss, the mean over the newest epoch so far.
        line_losses: loss sum, and units, of the steps since the newest log line.
        epoch_losses: number of the newest epoch, counted from 0, and the same of its steps so far.
        faults: what went wrong so far.
        stopped_early: nothing improved any more before the last step.
        scheduled: how often a scheduler of the user's own was stepped.
    """

    step: int = 0
    best: dict[str, float] = field(default_factory=dict)
    score: list[float] = field(default_factory=list)
    stale_epochs: int = 0
    train_seconds: float = 0.0
    startup_seconds: float = 0.0
    last: dict[str, float] = field(default_factory=dict)
    line_losses: list[float] = field(default_factory=lambda: [0.0, 0])
    epoch_losses: list[float] = field(default_factory=lambda: [0, 0.0, 0])
    faults: list[dict[str, Any]] = field(default_factory=list)
    stopped_early: bool = False
    scheduled: int = 0


@dataclass
class TrainState:
    """The live objects that a checkpoint covers.

    Attributes:
        scheduler: the user's own.
        restore_warning: what the checkpoint could not bring back, in words.
        initial_weights: what --init-from brought, on the rank that read it.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    precision: Precision
    average: AveragedModel | None
    progress: Progress
    scheduler: LRScheduler | None = None
    restore_warning: str = ""
    initial_weights: WeightMatch | None = None

    def capture(self, into: dict[str, Any] | None = None) -> dict[str, Any]:
        """Plain values and tensors in host memory; see `begin_capture`."""
        return self.begin_capture(into).finish()

    def begin_capture(self, into: dict[str, Any] | None = None, task: dict[str, Any] | None = None) -> "Snapshot":
        """Take what moves at any time, and leave what only the optimizer moves to `Snapshot.finish`.

        Args:
            into: an earlier capture that nobody reads any more; its memory is used again, which is several times faster
                than asking the system for fresh pages.
            task: what the task keeps beside these.
        """
        model = self.model.state_dict()
        state = {
            "model": model,
            "optimizer": self.optimizer.state_dict(),
            "precision": self.precision.state_dict(),
            "average": self.average.state_dict() if self.average else None,
            "progress": asdict(self.progress),
            "scheduler": self.scheduler.state_dict() if self.scheduler else None,
            "task": task or {},
        }
        extra = iterate_tensors(extra_state(model))
        moving = {tensor.data_ptr() for tensor in (*self.model.buffers(), *extra)}  # forward changes them
        later: list[tuple[Tensor, Tensor]] = []
        captured = dict(_on_host(state, into, moving, later))
        return Snapshot(captured, later, _stream_beside())

    def restore(self, state: dict[str, Any], origin: str) -> None:
        """Put a captured state into the live objects.

        Raises:
            RequestError: it is of another model; says which parameters differ.
        """
        check_fit(self.model, state["model"], origin)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.precision.load_state_dict(state["precision"])
        if self.average:
            self.average.load_state_dict(state["average"])
        if self.scheduler and state.get("scheduler"):
            self.scheduler.load_state_dict(state["scheduler"])
        self.progress.__dict__.update(state["progress"])
        self.progress.last.pop("epoch_loss", None)  # what train_loss was called where both were kept

    def eval_model(self) -> nn.Module:
        """The module whose weights are evaluated and published: the average where there is one."""
        return self.average.module if self.average else self.model


@dataclass
class Snapshot:
    """A state on its way to host memory.

    Attributes:
        state: whole once `finish` has returned.
    """

    state: dict[str, Any]
    _later: list[tuple[Tensor, Tensor]]
    _beside: torch.cuda.Stream | None

    def finish(self) -> dict[str, Any]:
        """Copy the rest, in any thread, before the optimizer moves it; on CUDA beside what the device computes."""
        with torch.cuda.stream(self._beside) if self._beside is not None else nullcontext():
            for target, source in self._later:
                target.copy_(source, non_blocking=True)
        if self._beside is not None:
            self._beside.synchronize()
        self._later = []
        return self.state


def _stream_beside() -> torch.cuda.Stream | None:
    """A stream that begins after all work that this thread's device has been given; None where there is no device.

    It is made here: in another thread the current device is another, and a stream takes no copies of its neighbour's.
    """
    if not torch.cuda.is_initialized():
        return None
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return stream


def _on_host(value: Any, into: Any, moving: set[int], later: list[tuple[Tensor, Tensor]]) -> Any:
    """Memory on the host, that of `into` as far as it has the same shape, with a copy of what is `moving`.

    Args:
        moving: addresses of the tensors that are copied at once; the others are added to `later`.
    """
    if isinstance(value, Tensor):
        fits = isinstance(into, Tensor) and into.shape == value.shape and into.dtype == value.dtype
        target = into if fits else torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
        if value.data_ptr() in moving:
            target.copy_(value.detach(), non_blocking=True)
        else:
            later.append((target, value.detach()))
        return target
    if isinstance(value, dict):
        there = into if isinstance(into, dict) else {}
        return {name: _on_host(entry, there.get(name), moving, later) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        old = into if isinstance(into, (list, tuple)) and len(into) == len(value) else [None] * len(value)
        return type(value)(_on_host(entry, was, moving, later) for entry, was in zip(value, old, strict=True))
    return copy(value)
