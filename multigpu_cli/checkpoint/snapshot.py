"""The state that a checkpoint holds, its copy in host memory, and the thread that writes it while training goes on."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from multigpu_cli.distributed.world import copy_stream, empty_on_host
from multigpu_cli.optimizers.eval_weights import EMAModel, eval_weights, is_schedule_free
from multigpu_cli.runtime.precision import Precision


@dataclass
class Progress:
    """How far a run is; data order and random numbers follow from `step`."""

    step: int = 0  # the position in the schedule: optimizer steps done, and those that a task skipped (PPO's target_kl)
    best: dict[str, float] = field(default_factory=dict)  # of the best evaluation so far, with its epoch; or empty
    score: list[float] = field(default_factory=list)  # the score of that evaluation; the task defines the order
    stale_epochs: int = 0  # evaluations since then without improvement
    train_seconds: float = 0.0  # over all attempts
    startup_seconds: float = 0.0  # over all attempts
    last: dict[str, float] = field(default_factory=dict)  # newest of each split, and train_loss, the epoch's mean
    line_losses: list[float] = field(default_factory=lambda: [0.0, 0])  # since the newest log line: loss sum, units
    epoch_losses: list[float] = field(default_factory=lambda: [0, 0.0, 0])  # index of the newest epoch; loss sum, units
    faults: list[dict[str, Any]] = field(default_factory=list)  # the faults so far, as the journal records them
    stopped_early: bool = False  # early stopping ended the run before its last step
    evaluation_pending: bool = False  # the epoch that ended with `step` has still to be evaluated
    scheduled: int = 0  # how often the user's own scheduler was stepped


@dataclass
class TrainState:
    """The objects that a checkpoint covers."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    precision: Precision
    average: EMAModel | None
    progress: Progress
    scheduler: LRScheduler | None = None  # the user's own, if any
    restore_warning: str = ""  # a message that names what the checkpoint could not restore
    initial_weights: WeightMatch | None = None  # what --init-from loaded, on the rank that read it
    part_states: dict[str, dict[str, Any]] = field(default_factory=lambda: {entry: {} for entry in PART_STATES})
    """Those of the restored checkpoint that parts have not taken: state by name by entry."""

    def capture(self, into: dict[str, Any] | None = None) -> dict[str, Any]:
        """Plain values and tensors in host memory; see `begin_capture`."""
        return self.begin_capture(into).finish()

    def state_dict(self, task: dict[str, Any] | None = None) -> dict[str, Any]:
        """What a checkpoint holds, with the task's own state; its tensors are not copies."""
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

        Outlines, on the meta device, stay as they are. `into` is an earlier capture that is no longer read: reusing its
        memory is several times faster than allocating new pages.
        """
        state = state or self.state_dict()
        extra = iterate_tensors(extra_state(state["model"]))
        volatile = {tensor.data_ptr() for tensor in (*self.model.buffers(), *extra)}  # forward changes them
        later: list[tuple[Tensor, Tensor]] = []
        return Snapshot(dict(_on_host(state, into, volatile, later)), later, _start_copy_stream())

    def restore(self, state: dict[str, Any], origin: str) -> None:
        """Load a captured state into the objects; if it is of another model, the RequestError names what differs."""
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
    """A state that is being copied to host memory."""

    state: dict[str, Any]  # complete once `finish` has returned
    _later: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _copy_stream: torch.cuda.Stream | None = None
    peers: Peers | None = None  # the other ranks, if each writes its own rows

    def finish(self) -> dict[str, Any]:
        """Copy the rest, in any thread, before the optimizer changes it; on CUDA concurrently with computation."""
        with torch.cuda.stream(self._copy_stream) if self._copy_stream is not None else nullcontext():
            for target, source in self._later:
                target.copy_(source, non_blocking=True)
        if self._copy_stream is not None:
            self._copy_stream.synchronize()
        self._later = []
        return self.state


def _start_copy_stream() -> torch.cuda.Stream | None:
    """The stream for copies, which goes on after all work queued on this thread's device; None without CUDA.

    It is called in the caller's thread: another thread has another current device, and a stream belongs to one device.
    """
    if not torch.cuda.is_initialized():
        return None
    stream = copy_stream(torch.device("cuda", torch.cuda.current_device()), "checkpoints")
    stream.wait_stream(torch.cuda.current_stream())
    return stream


def _on_host(value: Any, into: Any, volatile: set[int], later: list[tuple[Tensor, Tensor]]) -> Any:
    """Host memory for a state, reused from `into` where shapes agree; copies wait in `later`, but for `volatile`."""
    if isinstance(value, Tensor):
        if value.is_meta:
            return value
        fits = isinstance(into, Tensor) and into.shape == value.shape and into.dtype == value.dtype
        target = into if fits else empty_on_host(value)
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


class Writer(AbstractContextManager["Writer"]):
    """Runs jobs that only read copied state, one after the other, so that the training loop can continue."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._jobs: list[Future[None]] = []
        self._copied: threading.Event | None = None
        self.waited = 0.0  # seconds that the last `wait_for_staging` took

    def submit(self, copy: Callable[[], object], job: Callable[[], None]) -> None:
        """Submit a job, once `wait` has returned the result of the previous ones.

        What `copy` reads, which runs first, must not change until `wait_for_staging` returns.
        """
        assert not self._jobs
        copied = self._copied = threading.Event()
        self.waited = 0.0

        def work() -> None:
            try:
                copy()
            finally:
                copied.set()
            job()

        self.add(work)

    def add(self, job: Callable[[], None]) -> None:
        """Append a job, which runs after those that were submitted before."""
        self._jobs.append(self._pool.submit(job))

    def wait_for_staging(self) -> None:
        """Wait until the state that is to be written has been copied."""
        if self._copied is None:
            return
        began = time.perf_counter()
        self._copied.wait()
        self._copied, self.waited = None, time.perf_counter() - began

    @property
    def is_done(self) -> bool:
        """Whether there are jobs and all have finished, so that `wait` returns at once."""
        return bool(self._jobs) and all(job.done() for job in self._jobs)

    def wait(self) -> OSError | None:
        """Wait for the current jobs, if any; returns the first one's OSError, or None; any other error is raised."""
        jobs, self._jobs = self._jobs, []
        failure: OSError | None = None
        for job in jobs:
            try:
                job.result()
            except OSError as error:  # a full or missing disk: the caller decides whether training continues
                failure = failure or error
        return failure

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True)
