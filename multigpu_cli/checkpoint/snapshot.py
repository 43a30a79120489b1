"""What survives a restart: weights, optimizer, loss scale, averages, progress. What is not here is lost on resume."""

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from multigpu_cli.checkpoint.weights import check_fit
from multigpu_cli.runtime.precision import Precision


@dataclass
class Progress:
    """How far a run is; everything about data and randomness follows from `step`.

    Attributes:
        step: optimizer steps done.
        best: metrics of the best evaluation so far, with its epoch; empty before the first.
        score: that evaluation's score, as the task orders it.
        stale_epochs: evaluations since then.
        train_seconds, startup_seconds: totals over all attempts.
        last: metrics of the newest log line and of the newest evaluation of each split.
        faults: what went wrong so far.
        stopped_early: nothing improved any more before the last step.
    """

    step: int = 0
    best: dict[str, float] = field(default_factory=dict)
    score: list[float] = field(default_factory=list)
    stale_epochs: int = 0
    train_seconds: float = 0.0
    startup_seconds: float = 0.0
    last: dict[str, float] = field(default_factory=dict)
    faults: list[dict[str, Any]] = field(default_factory=list)
    stopped_early: bool = False


@dataclass
class Kept:
    """The live objects that a checkpoint covers."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    precision: Precision
    average: AveragedModel | None
    progress: Progress

    def capture(self, into: dict[str, Any] | None = None) -> dict[str, Any]:
        """Plain values and tensors in host memory.

        Args:
            into: an earlier capture that nobody reads any more; its memory is used again, which is several times faster
                than asking the system for fresh pages.
        """
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "precision": self.precision.state_dict(),
            "average": self.average.state_dict() if self.average else None,
            "progress": asdict(self.progress),
        }
        captured = dict(_on_host(state, into))
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the copies were only queued
        return captured

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
        self.progress.__dict__.update(state["progress"])

    def for_use(self) -> nn.Module:
        """The module whose weights are evaluated and published: the average where there is one."""
        return self.average.module if self.average else self.model


def _on_host(value: Any, into: Any) -> Any:
    """A copy in host memory, in that of `into` as far as it has the same shape."""
    if isinstance(value, Tensor):
        fits = isinstance(into, Tensor) and into.shape == value.shape and into.dtype == value.dtype
        target = into if fits else torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
        return target.copy_(value.detach(), non_blocking=True)
    if isinstance(value, dict):
        there = into if isinstance(into, dict) else {}
        return {name: _on_host(entry, there.get(name)) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        fits = isinstance(into, (list, tuple)) and len(into) == len(value)
        return type(value)(map(_on_host, value, into if fits else [None] * len(value)))
    return value
