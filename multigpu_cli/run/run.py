"""Run: the components of a training, with what observes, saves, logs and ends it."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from multigpu_cli.checkpoint.snapshot import Progress, Writer
from multigpu_cli.checkpoint.store import Store
from multigpu_cli.config.schema import CheckpointConfig
from multigpu_cli.data.loader import Batch
from multigpu_cli.distributed.launch_env import PreviousAttempt
from multigpu_cli.distributed.world import World, all_reduce_sum, empty_on_host
from multigpu_cli.faults.explain import hide_secrets
from multigpu_cli.faults.stop import SkippedStepLimit, StopConsensus, StopRequest
from multigpu_cli.faults.watchdog import Watchdog
from multigpu_cli.monitor.console import Console, ProgressDisplay
from multigpu_cli.monitor.gpu import Sampler
from multigpu_cli.monitor.journal import Journal
from multigpu_cli.monitor.meters import NoiseMeter, SampleTrace, StepTimer, add_exactly
from multigpu_cli.monitor.run_state import RunState
from multigpu_cli.optimizers.eval_weights import is_schedule_free
from multigpu_cli.planning.batch import StepLayout
from multigpu_cli.run.assembly.components import StepResult, TrainComponents
from multigpu_cli.strategies.base import Saver

if TYPE_CHECKING:
    from multigpu_cli.monitor.tensorboard import TensorBoard


_NOTHING = nullcontext()
_MAX_UNPACKED = 1000  # losses are packed into one tensor when more of them wait to be reduced


class LossMeter:
    """Keeps the losses of steps on the device until they are reduced, so that no step waits.

    A step's micro-batches are added without rounding, and the steps in their order, so that the means depend neither on
    the number of workers nor on when losses are reduced. A step whose loss is not finite was skipped: it is left out.

    The sums are in the progress (`line_losses`, `epoch_losses`), and so in checkpoints; `last` is the newest mean.
    """

    def __init__(self, world: World, progress: Progress, steps_per_epoch: int) -> None:
        self._world, self._progress, self._steps_per_epoch = world, progress, steps_per_epoch
        self.last: float
        self._copy: tuple[Tensor, torch.cuda.Event | None] | None = None  # of a loss, on its way from the device
        self._copied = -math.inf
        self._reset()

    def _reset(self) -> None:
        self._steps: list[tuple[int, int]] = []  # number, and micro-batches over all workers
        self._units: list[Tensor | int] = []
        self._places: list[int] = []  # of this worker's losses among the micro-batches of all steps
        self._unpacked: list[Tensor] = []  # () each
        self._packed: list[Tensor] = []  # (n,) each
        self._count = 0
        self._newest: tuple[Mapping[int, Tensor], int, Tensor | int] = ({}, 0, 0)  # losses, micro-batches, units
        self._shown: float | None = None

    def add(self, step: int, micro_batches: int, losses: Mapping[int, Tensor], units: Tensor | int) -> None:
        """Add a step (from 0): micro-batches and units of all workers, this worker's loss sums () by micro-batch."""
        self._newest = losses, micro_batches, units
        self._steps.append((step, micro_batches))
        self._units.append(units)
        self._places += [self._count + number for number in losses]
        self._unpacked += losses.values()
        self._count += micro_batches
        if len(self._unpacked) > _MAX_UNPACKED:
            self._pack()

    def peek(self) -> float | None:
        """This worker's mean loss in a recent step, new each second, without a wait for the device; None: none yet."""
        losses, micro_batches, units = self._newest
        if losses and self._copy is None and time.monotonic() - self._copied >= 1:
            new = torch.stack([loss.reshape(()) for loss in losses.values()]).mean() * micro_batches / units
            self._copy = empty_on_host(new).copy_(new, non_blocking=True), torch.cuda.Event() if new.is_cuda else None
            self._copied = time.monotonic()
            if self._copy[1]:
                self._copy[1].record()
        if self._copy and (self._copy[1] is None or self._copy[1].query()):
            self._shown, self._copy = float(self._copy[0]), None
        return self._shown

    def _pack(self) -> None:
        if self._unpacked:
            self._packed.append(torch.stack([loss.reshape(()) for loss in self._unpacked]).double())
            self._unpacked, self._newest = [], ({}, 0, 0)

    def all_reduce_pending(self) -> None:
        """Reduce the steps since the last call; all workers call it together, and wait for their devices."""
        if not self._steps:
            return
        self._pack()
        slots = torch.zeros(self._count, dtype=torch.float64, device=self._world.device)
        if self._packed:
            slots[torch.tensor(self._places, device=slots.device)] = torch.cat(self._packed)
        values = iter(all_reduce_sum(self._world, slots).tolist())
        units = torch.stack([torch.as_tensor(count) for count in self._units]).tolist()
        for (step, micro_batches), count in zip(self._steps, units, strict=True):
            self._count_step(step, add_exactly([next(values) for _ in range(micro_batches)]), count)
        self._progress.last["train_loss"] = _mean(*self._progress.epoch_losses[1:])
        self._reset()

    def _count_step(self, step: int, loss: float, units: int) -> None:
        line, epoch, progress = self._progress.line_losses, step // self._steps_per_epoch, self._progress
        self.last = loss / max(1, units)
        if progress.epoch_losses[0] != epoch:
            progress.epoch_losses = [epoch, 0.0, 0]
        if math.isfinite(loss):
            line[0], line[1] = line[0] + loss, line[1] + units
            progress.epoch_losses[1] += loss
            progress.epoch_losses[2] += units

    def pop_mean_since_log(self) -> float:
        """The mean over all samples, or tokens, of the steps reduced since the last call; NaN if there is none."""
        mean, self._progress.line_losses = _mean(*self._progress.line_losses), [0.0, 0]
        return mean


def _mean(loss: float, units: float) -> float:
    return loss / units if units else math.nan


@dataclass
class StepObserver:
    """Hang watchdog, clocks, gradient noise scale, skipped steps, loss, sample trace.

    A step calls four verbs: `fetch`, `phase`, `backward_done` and `step_done`.
    """

    watchdog: Watchdog
    timer: StepTimer
    noise: NoiseMeter
    nonfinite: SkippedStepLimit
    loss: LossMeter
    trace: SampleTrace | None
    waits_for_data: bool = True  # or batches are ready: on a GPU, the events that time a wait take the host longer
    _tokens: tuple[int, int] = field(init=False, default=(0, 0))  # without and with padding, since they were asked for
    _layout: StepLayout = field(init=False)
    phase: Callable[..., None] = field(init=False)
    """Reports to the watchdog that a phase of this step begins: its name, and (n,) numbers of its samples or None."""
    _indices: list[Tensor] = field(init=False)  # of this step's batches so far

    def fetch(self, layout: StepLayout, work: Iterator[Batch]) -> Iterator[tuple[Batch, bool]]:
        """Yield this worker's micro-batches, and whether each is its last in the step; measures the wait for each."""
        self._layout, self._indices = layout, []
        self.phase = partial(self.watchdog.set_position, layout.step)
        for left in range(len(layout.passes) - 1, -1, -1):
            self.phase("fetching data")
            with self.timer.data_wait if self.waits_for_data else _NOTHING:
                batch = next(work)
            self._indices.append(batch.sample_indices)
            if batch.tokens:
                real, places = self._tokens
                self._tokens = real + batch.tokens.real, places + batch.tokens.places
            yield batch, left == 0

    def take_tokens(self) -> tuple[int, int]:
        """This worker's tokens since the last call, without and with padding; none where nobody counts them."""
        tokens, self._tokens = self._tokens, (0, 0)
        return tokens

    def backward_done(self, gradients: Callable[[], list[Tensor]]) -> None:
        """The gradients, which the function lists, are the sum of this worker's micro-batches so far."""
        if self.noise.is_due(self._layout.step + 1, len(self._layout.passes), len(self._indices)):
            self.noise.record_gradient(gradients())

    def step_done(self, outcome: StepResult, units: Tensor | int) -> None:
        """The optimizer has stepped, or skipped the step; `units` is the step's loss units over all workers."""
        step = self._layout.step
        counted = isinstance(units, int) or units > 0  # a step without units is skipped too, and no fault
        self.nonfinite.record(step, outcome.skipped if counted is True else outcome.skipped * counted)
        self.loss.add(step, outcome.micro_batches, outcome.losses, units)
        if self.trace:
            self.trace.write(step + 1, self._indices)


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
    """Writes checkpoints, and holds what goes into the next one."""

    store: Store
    writer: Writer
    saver: Saver
    schedule: CheckpointSchedule
    saved_step: int  # step of the newest checkpoint, to which the result of its evaluation is added; -1: none
    best: dict[str, Tensor] = field(default_factory=dict)  # host copy of the best weights, until they are written
    best_sha256: str = ""  # of the best weights that were written, on rank 0
    in_flight: int = -1  # step of the checkpoint that is being written, or was last, on rank 0
    written: int = -1  # step of the last one that is on disk, as far as rank 0 knows; -1 before that of this attempt


@dataclass
class RunLog:
    """The outputs of a run: journal, TensorBoard, console, its state, and what only its log lines need."""

    journal: Journal
    tensorboard: "TensorBoard | None"
    console: Console
    progress_bar: ProgressDisplay
    state: RunState
    gpu_monitor: Sampler | None  # watches this rank's GPU
    flops_per_sample: float | None  # where the device's peak rate is known
    allocator_retries: int = 0  # of all ranks, at the last log line
    unknown_gpu_fields: frozenset[tuple[str, int]] = frozenset()  # by rank: the user knows that they are missing
    at_last_epoch: tuple[int, float] = (0, 0.0)  # samples and seconds of this attempt, when the last epoch ended


@dataclass
class RunControl:
    """What ends a run early, and how the attempt before it ended."""

    stop: StopRequest  # a signal to this rank
    consensus: StopConsensus  # of all ranks, on a stop and on overdue checkpoints
    previous_attempt: PreviousAttempt | None = None  # how it ended; None after the first step
    pause_at: int | None = None  # a step, the same on every rank, after which the run stops; None: at its end
    summary_written: bool = False


class StepEnd(NamedTuple):
    """What ends with a step, and the position in the schedule before and after it."""

    previous_step: int
    step: int
    at_log_interval: bool
    at_epoch_end: bool  # of an epoch, or of the run
    savable: bool  # the run can be resumed from here


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

    @property
    def epochs(self) -> int:
        """The number of epochs of the plan, the last of which may be cut short."""
        return -(-self.plan.schedule.total_steps // self.plan.batches.steps_per_epoch)

    def read_newest_numbers(self) -> dict[str, Any]:
        """What the progress bar shows between two `train` lines."""
        rate = self.observer.timer.samples_per_second
        loss = self.observer.loss.peek()
        return {"epoch": max(1, self.epoch), "epochs": self.epochs, "loss": loss, "samples_per_second": rate or None}

    def log_fault(self, kind: str, action: str, **more: Any) -> None:
        """Journal a fault, and warn the user; the text may quote an exception."""
        fault = {"kind": kind, "action": hide_secrets(action), "step": self.progress.step}
        self.log.journal.write("fault", **fault, **more)
        self.progress.faults.append(fault)
        self.log.console.warn(f"step {self.progress.step}: {fault['action']}")

    def complete_step(self) -> StepEnd:
        """Count a step, and return what ends with it; all ranks call it together."""
        progress, plan = self.state.progress, self.spec.plan
        batches, total, before = plan.batches, plan.schedule.total_steps, progress.step
        per_epoch = batches.steps_per_epoch
        progress.step = step = min(total, self.loaders.train.next_step(before, batches))
        self.observer.timer.step(batches.num_samples(before % per_epoch))
        self.log.progress_bar.update(step)
        interval = self.config.log.interval
        epoch = step % per_epoch == 0 or step == total
        log = step // interval > before // interval or step == total
        return StepEnd(before, step, log, epoch, savable=epoch or not self.loaders.train.resumable_only_at_epoch)

    def agree_on_requests(self, end: StepEnd) -> tuple[bool, bool, bool, bool]:
        """Return whether to stop now, to pause after an evaluation, to save, and to add a part: as any rank was asked.

        All ranks call it together, and get the same.
        """
        self.observer.watchdog.set_position(end.step, "agreeing")
        wishes = (self.control.stop.signal is not None, self.checkpointer.schedule.overdue(), self.log.state.asked)
        stopping, overdue, asked = self.control.consensus.vote(end.step, wishes) if end.savable else [False] * 3
        paused = self.control.pause_at is not None and end.savable and end.step >= self.control.pause_at
        return stopping, paused, overdue, asked


def use_published_weights(run: Run) -> AbstractContextManager[nn.Module]:
    """`TrainState.eval_weights`; a checkpoint in flight first copies the weights that take steps."""
    if is_schedule_free(run.state.optimizer):
        run.checkpointer.writer.wait_for_staging()
    return run.state.eval_weights()
