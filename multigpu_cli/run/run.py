"""Run: the components of a training, with what observes, saves, logs and ends it."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from multigpu_cli.faults.stop import StopConsensus, StopRequest
from multigpu_cli.monitor.console import Console
from multigpu_cli.monitor.journal import Journal
from multigpu_cli.monitor.progress import ProgressDisplay
from multigpu_cli.run.checkpointing import Checkpointer
from multigpu_cli.run.components import TrainComponents
from multigpu_cli.run.hooks import Hooks
from multigpu_cli.run.step_observer import StepObserver
from multigpu_cli.runtime.restart_records import PreviousAttempt

if TYPE_CHECKING:
    from multigpu_cli.monitor.gpu_sampler import Sampler
    from multigpu_cli.monitor.tensorboard import TensorBoard


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


@dataclass
class Run(TrainComponents):
    """Everything that a training loop touches."""

    observer: StepObserver
    checkpointer: Checkpointer
    log: RunLog
    control: RunControl
    hooks: Hooks

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
