"""The state that a checkpoint holds: weights, optimizer, loss scale, averaged weights, progress."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from multigpu_cli.capabilities import PART_STATES
from multigpu_cli.checkpoint.initial_weights import WeightMatch
from multigpu_cli.checkpoint.pieces import iterate_tensors
from multigpu_cli.checkpoint.store import Peers
from multigpu_cli.checkpoint.weights import check_fit, extra_state
from multigpu_cli.optimizers.eval_weights import EMAModel, eval_weights, is_schedule_free
from multigpu_cli.runtime.precision import Precision


@dataclass
class Progress:
    """How far a run is; data order and random numbers follow from `step`.

    Attributes:
        step: the position in the schedule: optimizer steps done, and those that a task skipped (PPO's target_kl).
        best: metrics of the best evaluation so far, with its epoch; empty before the first.
        score: the score of that evaluation; the task defines the order.
        stale_epochs: evaluations since then without improvement.
        train_seconds, startup_seconds: totals over all attempts.
        last: metrics of the newest evaluation of each split, and train_loss, the mean over the newest epoch so far.
        line_losses: loss sum and units of the steps since the newest log line.
        epoch_losses: index of the newest epoch, and loss sum and units of its steps so far.
        faults: the faults so far, as the journal records them.
        stopped_early: early stopping ended the run before its last step.
        scheduled: how often the user's own scheduler was stepped.
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
    """The objects that a checkpoint covers.

    Attributes:
        scheduler: the user's own, if any.
        restore_warning: a message that names what the checkpoint could not restore.
        initial_weights: what --init-from loaded, on the rank that read it.
        part_states: of the checkpoint that was restored, what parts have not taken: state by name by entry.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    precision: Precision
    average: EMAModel | None
    progress: Progress
    scheduler: LRScheduler | None = None
    restore_warning: str = ""
    initial_weights: WeightMatch | None = None
    part_states: dict[str, dict[str, Any]] = field(default_factory=lambda: {entry: {} for entry in PART_STATES})

    def capture(self, into: dict[str, Any] | None = None) -> dict[str, Any]:
        """Plain values and tensors in host memory; see `begin_capture`."""
        return self.begin_capture(into).finish()

    def state_dict(self, task: dict[str, Any] | None = None) -> dict[str, Any]:
        """What a checkpoint holds; its tensors are not copies.

        Args:
            task: the task's own state.
        """
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "precision": self.precision.state_dict(),
            "average": self.average.state_dict() if self.average else self._copy_eval_weights(),
            "progress": asdict(self.progress),
            "scheduler": self.scheduler.state_dict() if self.scheduler else None,
            "task": task or {},
        }

    def _copy_eval_weights(self) -> dict[str, Any] | None:
        """The weights for use of a schedule-free optimizer, named as an average's; None if they learn themselves."""
        if not is_schedule_free(self.optimizer):
            return None
        with self.eval_weights() as model:
            return {
                f"module.{name}": value.detach().clone() if isinstance(value, Tensor) else value
                for name, value in model.state_dict().items()
            }

    def begin_capture(self, into: dict[str, Any] | None = None, state: dict[str, Any] | None = None) -> "Snapshot":
        """Copy what may change at any time; tensors that only the optimizer changes are left to `Snapshot.finish`.

        Outlines, on the meta device, stay as they are.

        Args:
            into: an earlier capture that is no longer read; reusing its memory is several times faster than allocating
                new pages.
            state: what `state_dict` returned.
        """
        state = state or self.state_dict()
        extra = iterate_tensors(extra_state(state["model"]))
        volatile = {tensor.data_ptr() for tensor in (*self.model.buffers(), *extra)}  # forward changes them
        later: list[tuple[Tensor, Tensor]] = []
        captured = dict(_on_host(state, into, volatile, later))
        return Snapshot(captured, later, _create_copy_stream())

    def restore(self, state: dict[str, Any], origin: str) -> None:
        """Load a captured state into the objects.

        Raises:
            RequestError: the state is of another model; the message names the parameters that differ.
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
        self.part_states = {entry: dict(state.get(entry) or {}) for entry in PART_STATES}  # older ones have none
        self.progress.last.pop("epoch_loss", None)  # the name of train_loss in older checkpoints

    def eval_model(self) -> nn.Module:
        """The module whose weights are evaluated and published; see `eval_weights`."""
        return self.average.module if self.average else self.model

    @contextmanager
    def eval_weights(self) -> Iterator[nn.Module]:
        """That module with these weights: the average of --ema, or what a schedule-free optimizer has for use."""
        with eval_weights(self.optimizer):
            yield self.eval_model()


@dataclass
class Snapshot:
    """A state that is being copied to host memory.

    Attributes:
        state: complete once `finish` has returned.
        peers: the other ranks, if each writes its own rows.
    """

    state: dict[str, Any]
    _later: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _copy_stream: torch.cuda.Stream | None = None
    peers: Peers | None = None

    def finish(self) -> dict[str, Any]:
        """Copy the rest, in any thread, before the optimizer changes it; on CUDA concurrently with computation."""
        with torch.cuda.stream(self._copy_stream) if self._copy_stream is not None else nullcontext():
            for target, source in self._later:
                target.copy_(source, non_blocking=True)
        if self._copy_stream is not None:
            self._copy_stream.synchronize()
        self._later = []
        return self.state


def _create_copy_stream() -> torch.cuda.Stream | None:
    """A stream that starts after all work queued on this thread's device; None without CUDA.

    It is created in the caller's thread: another thread has another current device, and a stream belongs to one device.
    """
    if not torch.cuda.is_initialized():
        return None
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return stream


def _on_host(value: Any, into: Any, volatile: set[int], later: list[tuple[Tensor, Tensor]]) -> Any:
    """Host memory for a state, reused from `into` where shapes agree; `volatile` tensors are copied at once.

    Args:
        volatile: addresses of the tensors that are copied at once; the others are added to `later`.
    """
    if isinstance(value, Tensor):
        if value.is_meta:
            return value
        fits = isinstance(into, Tensor) and into.shape == value.shape and into.dtype == value.dtype
        target = into if fits else torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
        if value.data_ptr() in volatile:
            target.copy_(value.detach(), non_blocking=True)
        else:
            later.append((target, value.detach()))
        return target
    if isinstance(value, dict):
        there = into if isinstance(into, dict) else {}
        return {name: _on_host(entry, there.get(name), volatile, later) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        old = into if isinstance(into, (list, tuple)) and len(into) == len(value) else [None] * len(value)
        return type(value)(_on_host(entry, was, volatile, later) for entry, was in zip(value, old, strict=True))
    return copy(value)
