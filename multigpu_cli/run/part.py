"""`Part`: one capability of a run that the core does not know."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

from torch import nn

from multigpu_cli.capabilities import PARTS, REQUESTS, load, load_given
from multigpu_cli.distributed.world import World, run_on_main_rank
from multigpu_cli.faults.watchdog import Watchdog
from multigpu_cli.monitor.console import Console
from multigpu_cli.monitor.journal import Event
from multigpu_cli.run.assembly.components import StepResult, TrainComponents
from multigpu_cli.run.request.spec import RunSpec
from multigpu_cli.run.run import Moments, Run
from multigpu_cli.tasks.base import Task


class Part:
    """One capability of one run; a method that it does not have does nothing, and costs nothing.

    Its class stands in `capabilities.PARTS`, and is made where its setting is given. All ranks call each method
    together, where nothing else is said. What fails up to `fitted` is a RequestError, the same on every rank, and
    nothing was written; from `start` on it is the failure of the run.
    """

    def __init__(self, spec: RunSpec, world: World) -> None:
        """Read and check its settings."""

    def plan_notes(self) -> dict[str, str | list[str]]:
        """What the plan says of it, by the keys of `capabilities.PLAN_NOTES`; asked after `built`."""
        return {}

    def task_built(self, task: Task) -> None:
        """The task, before the model that it will call."""

    def model_built(self, model: nn.Module) -> None:
        """The network on this rank, before the strategy takes it."""

    def built(self, components: TrainComponents) -> None:
        """Called when model, task, optimizer and data are built and have the state of the checkpoint."""

    def fitted(self, components: TrainComponents) -> None:
        """The batch sizes fit the memory; next the run folder is locked. Not for a dry run."""

    def follow_journal(
        self, components: TrainComponents, console: Console, watchdog: Watchdog, stack: ExitStack
    ) -> Callable[[Event], None] | None:
        """A listener of the journal, or None; rank 0 alone calls it, before the journal is opened."""
        return None

    def start(self, run: Run, stack: ExitStack) -> None:
        """The first step of this attempt is next; `stack` is closed when the run has ended, in whichever way."""

    def epoch_begin(self, run: Run) -> None:
        """Between two epochs, or before the first step, while no loader is at work."""

    def after_backward(self, run: Run, step: int) -> None:
        """The gradient of step `step`, counted from 0, is that of the global batch; the optimizer is next."""

    def step_end(self, run: Run, step: int, outcome: StepResult) -> None:
        """Step `step`, counted from 0, is done."""

    def evaluated(self, run: Run, split: str, metrics: Mapping[str, float]) -> None:
        """An evaluation of a split is done."""

    def epoch_end(self, run: Run) -> None:
        """An epoch is done, with its evaluation."""

    def written(self, run: Run) -> None:
        """Rank 0 has asked how a checkpoint's writing ended: `checkpointer.written` is the newest one on disk."""

    def saved(self, run: Run) -> None:
        """All ranks, after `written`: before the next checkpoint is copied, and after the last one is on disk."""

    def state_dict(self, run: Run) -> dict[str, Any]:
        """Its entries of a checkpoint's state."""
        return {}

    def end(self, run: Run, summary: Mapping[str, Any]) -> None:
        """The run has ended, in whichever way; its summary is written."""


def load_parts(spec: RunSpec, world: World) -> list[Part]:
    """The parts whose settings are given, and right; all ranks call it together, and raise the same."""
    return [part(spec, world) for part in load_given(PARTS, spec.config)]


def bind_moments(parts: Sequence[Part]) -> Moments:
    """Of each moment the methods of those parts that have it."""

    def collect(name: str) -> tuple[Any, ...]:
        return tuple(getattr(part, name) for part in parts if getattr(type(part), name) is not getattr(Part, name))

    return Moments(**{each.name: collect(each.name) for each in fields(Moments)})


def add_requested_part(run: Run) -> None:
    """Add the part that logs/request asks for, until it restores the moments; all ranks together, between two steps."""
    if words := run_on_main_rank(run.world, run.log.state.take_request):
        name, steps, number = words
        more = bind_moments([load(REQUESTS[name])(run, int(steps), number)])
        run.moments = Moments(**{name: methods + vars(more)[name] for name, methods in vars(run.moments).items()})
