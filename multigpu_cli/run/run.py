"""Run: the components of a training, with what observes, saves, logs and ends it."""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from multigpu_cli.checkpoint.store import Store
from multigpu_cli.checkpoint.writer import Writer
from multigpu_cli.config.schema import CheckpointConfig
from multigpu_cli.faults.stop import StopConsensus, StopRequest
from multigpu_cli.monitor.console import Console
from multigpu_cli.monitor.journal import Journal
from multigpu_cli.monitor.progress import ProgressDisplay
from multigpu_cli.run.components import TrainComponents
from multigpu_cli.run.step_observer import StepObserver
from multigpu_cli.run.step_result import StepResult
from multigpu_cli.runtime.restart_records import PreviousAttempt

if TYPE_CHECKING:
    from multigpu_cli.monitor.gpu_sampler import Sampler
    from multigpu_cli.monitor.tensorboard import TensorBoard


class CheckpointSchedule:
    """When checkpoints are due: at the end of each epoch, or every so many steps or minutes."""

    def __init__(self, config: CheckpointConfig) -> None:
        text = config.every or ""
        self._minutes = float(text[:-1]) if text.endswith("m") else None
        self._steps = int(text) if text.isdigit() else None
        self._last, self._pending = time.monotonic(), False

    def update_due(self, before: int, step: int, *, epoch_ended: bool) -> bool:
        """Whether a checkpoint is due, by step number, and so the same on every rank; True until one is saved."""
        now = step // self._steps > before // self._steps if self._steps else epoch_ended and self._minutes is None
        self._pending |= now
        return self._pending

    def overdue(self) -> bool:
        """Whether a checkpoint is due by this rank's clock, on which the ranks have to agree."""
        return self._minutes is not None and time.monotonic() - self._last >= 60 * self._minutes

    def mark_saved(self) -> None:
        self._last, self._pending = time.monotonic(), False


@dataclass
class Checkpointer:
    """Writes checkpoints, and holds what goes into the next one.

    Attributes:
        saved_step: that of the newest checkpoint.
        best: host copy of the best weights, until they are written with a checkpoint.
        best_in_flight: the best weights that are being written.
        best_sha256: of the best weights that were written, on rank 0.
        snapshot: what this rank wrote last, or is writing.
        owner: what the lock of the run folder says, if all ranks of a sharded run see it, and so write their rows.
        saves: checkpoints that were begun.
        in_flight: step of the checkpoint that is being written, or was last, on rank 0.
        written: step of the last one that is on disk, as far as rank 0 knows; -1 before that of this attempt.
    """

    store: Store
    writer: Writer
    schedule: CheckpointSchedule
    saved_step: int
    best: dict[str, Tensor] | None = None
    best_in_flight: dict[str, Tensor] | None = None
    best_sha256: str = ""
    snapshot: dict[str, Any] | None = None
    owner: str = ""
    saves: int = 0
    in_flight: int = -1
    written: int = -1


@dataclass
class RunLog:
    """The outputs of a run: journal, TensorBoard, console, and what only its log lines need.

    Attributes:
        gpu_monitor: watches this rank's GPU.
        flops_per_sample: where the device's peak rate is known.
        unknown_gpu_fields: GPU metrics, by rank, that the user knows to be missing.
    """

    journal: Journal
    tensorboard: "TensorBoard | None"
    console: Console
    progress_bar: ProgressDisplay
    gpu_monitor: "Sampler | None"
    flops_per_sample: float | None
    unknown_gpu_fields: frozenset[tuple[str, int]] = frozenset()


@dataclass
class RunControl:
    """What ends a run early, and how the attempt before it ended.

    Attributes:
        stop: a signal to this rank.
        consensus: of all ranks, on a stop and on overdue checkpoints.
        previous_attempt: how it ended; None after the first step.
    """

    stop: StopRequest
    consensus: StopConsensus
    previous_attempt: PreviousAttempt | None = None
    summary_written: bool = False


class StepEnd(NamedTuple):
    """What ends with a step.

    Attributes:
        previous_step, step: the position in the schedule before and after the step.
        at_log_interval: a log interval.
        at_epoch_end: an epoch, or the run.
        savable: the run can be resumed from here.
    """

    previous_step: int
    step: int
    at_log_interval: bool
    at_epoch_end: bool
    savable: bool


@dataclass(frozen=True)
class Moments:
    """What parts do at each moment: bound methods, in the order of the parts; see `run.part.Part`."""

    start: tuple[Callable[["Run", ExitStack], None], ...] = ()
    epoch_begin: tuple[Callable[["Run"], None], ...] = ()
    after_backward: tuple[Callable[["Run", int], None], ...] = ()
    step_end: tuple[Callable[["Run", int, StepResult], None], ...] = ()
    evaluated: tuple[Callable[["Run", str, Mapping[str, float]], None], ...] = ()
    epoch_end: tuple[Callable[["Run"], None], ...] = ()
    written: tuple[Callable[["Run"], None], ...] = ()
    saved: tuple[Callable[["Run"], None], ...] = ()
    state_dict: tuple[Callable[["Run"], dict[str, Any]], ...] = ()
    end: tuple[Callable[["Run", Mapping[str, Any]], None], ...] = ()


@dataclass
class Run(TrainComponents):
    """Everything that a training loop touches."""

    observer: StepObserver
    checkpointer: Checkpointer
    log: RunLog
    control: RunControl
    moments: Moments

    @property
    def folder(self) -> Path:
        return Path(self.spec.resume_point.folder)

    @property
    def finished(self) -> bool:
        """Whether the planned steps are done, or nothing improves any more."""
        return self.progress.step >= self.plan.schedule.total_steps or self.progress.stopped_early

    @property
    def epoch(self) -> int:
        """The epoch of the last step that is done, counted from 1; 0 before the first."""
        return -(-self.progress.step // self.plan.batches.steps_per_epoch)

    def log_fault(self, kind: str, action: str, **more: Any) -> None:
        """Journal a fault, and warn the user."""
        fault = {"kind": kind, "action": action, "step": self.progress.step}
        self.log.journal.write("fault", **fault, **more)
        self.progress.faults.append(fault)
        self.log.console.warn(f"step {self.progress.step}: {action}")

    def complete_step(self) -> StepEnd:
        """Count a step, and return what ends with it; all ranks call it together."""
        progress, batches, total = self.progress, self.plan.batches, self.plan.schedule.total_steps
        before = progress.step
        progress.step = step = min(total, self.loaders.train.next_step(before, batches))
        self.observer.timer.step(batches.num_samples(before % batches.steps_per_epoch))
        self.log.progress_bar.update(step)
        interval = self.config.log.interval
        epoch = step % batches.steps_per_epoch == 0 or step == total
        log = step // interval > before // interval or step == total
        return StepEnd(before, step, log, epoch, savable=epoch or not self.loaders.train.resumable_only_at_epoch)

    def agree_on_stop_and_save(self, end: StepEnd) -> tuple[bool, bool]:
        """Whether a rank was asked to stop, and whether a checkpoint is overdue: the same on every rank."""
        self.observer.watchdog.set_position(end.step, "agreeing")
        wishes = (self.control.stop.signal is not None, self.checkpointer.schedule.overdue())
        stopping, overdue = self.control.consensus.vote(end.step, wishes) if end.savable else (False, False)
        return stopping, overdue
