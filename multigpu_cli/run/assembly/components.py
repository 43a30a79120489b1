"""The parts of a training that a step and an evaluation need, and what a step gives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from multigpu_cli.checkpoint.snapshot import Progress, TrainState
from multigpu_cli.config.schema import Config
from multigpu_cli.data.loader import BatchStream, Loader
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import pluralize
from multigpu_cli.planning.plan import Plan
from multigpu_cli.run.after_step import AfterStep, find_after_step
from multigpu_cli.run.request.spec import RunSpec
from multigpu_cli.runtime.compile import CompiledModel
from multigpu_cli.strategies.base import Strategy
from multigpu_cli.tasks.base import LossNormalizer, Task


@dataclass
class Loaders:
    """The data of each split."""

    train: BatchStream
    val: Loader | None
    test: Loader | None
    max_eval_batch_size: int | None = None  # the most samples of an evaluation's batch, if memory limits it

    def close(self) -> None:
        """End the loader processes, if there are any."""
        for loader in (self.train, self.val, self.test):
            if loader is not None:
                loader.close()


@dataclass
class TrainComponents:
    """The parts that a step and an evaluation need; `score` orders the results of evaluations, None: as the task does.

    `frozen` are parameters that do not learn yet, by what the table of learning rates says of them.
    """

    spec: RunSpec
    world: World
    task: Task
    state: TrainState
    strategy: Strategy
    loaders: Loaders
    loss_normalizer: LossNormalizer
    score: Callable[[dict[str, float]], Sequence[float]] | None = field(default=None, kw_only=True)
    compiled: CompiledModel | None = field(default=None, kw_only=True)
    frozen: dict[str, list[Tensor]] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        if self.compiled:  # out of memory may halve it during the run
            self.compiled.full_batch_size = lambda: self.plan.batches.micro_batch * self.task.rows_per_sample

    @property
    def config(self) -> Config:
        return self.spec.config

    @property
    def plan(self) -> Plan:
        return self.spec.plan

    @property
    def progress(self) -> Progress:
        return self.state.progress

    def set_learning_rates(self, step: int) -> None:
        """Set the rate of optimizer step `step`: the schedule's, or that of the user's own optimizer and scheduler."""
        self.spec.factories.set_rate(self.state, self.plan, step)

    @cached_property
    def optimizer_draws(self) -> bool:
        """Whether the optimizer is code of the user's own, which may draw random numbers in a step."""
        return self.spec.factories.may_draw(self.config)

    @cached_property
    def after_step(self) -> AfterStep | None:
        """Return the caller of `after_step` of model and task; None if neither has it. See `find_after_step`."""
        guard = self.config.reproducibility.guard != "off"
        return find_after_step(self.task, self.state.model, self.strategy, self.world, guard=guard)

    @property
    def eval_batch_size(self) -> int:
        """Samples in one batch of an evaluation: twice a micro-batch, because no activations are kept."""
        usual = 2 * self.plan.batches.micro_batch
        return min(usual, self.loaders.max_eval_batch_size or usual)

    @property
    def evaluates_in_batches(self) -> bool:
        """Whether the task evaluates batches of samples, rather than in its own way (PPO's episodes)."""
        return type(self.task).evaluate is Task.evaluate


class StepResult(NamedTuple):
    """The result of one step: tensors that stay on the device until they are logged."""

    micro_batches: int  # of the step, over all workers
    losses: dict[int, Tensor]  # () loss sums of this worker's micro-batches, by their number in the step
    grad_norm: Tensor  # () of the global gradient
    skipped: Tensor  # () 1 where the optimizer skipped the step

    def losses_by_micro_batch(self, device: torch.device) -> Tensor:
        """(micro-batches,) float64: this worker's loss sums in their slots, zeros elsewhere."""
        slots = torch.zeros(self.micro_batches, dtype=torch.float64, device=device)
        for number, loss in self.losses.items():
            slots[number] = loss
        return slots


_LISTED = 3  # names in a line


class GroupLabel(NamedTuple):
    """What the table says of a group."""

    factor: float  # its share of the schedule's rate
    weight_decay: float | None  # None if optimizer.groups is not given
    hidden: bool | None  # moved by Muon; None with any other optimizer

    def format(self, peak: float) -> str:
        rate = f"{peak * self.factor:.4g}" + (f" (× {self.factor:.4g})" if self.factor != 1 else "")
        decay = "" if self.weight_decay is None else f", decay {self.weight_decay:g}"
        return rate + decay + ("" if self.hidden is None else ", Muon" if self.hidden else ", AdamW")


def describe_groups(components: TrainComponents) -> list[tuple[str, str]]:
    """Label and value of a line for each group, the highest rate first, and what is frozen; [] where all is alike."""
    model, peak = components.state.model, components.plan.schedule.peak
    # from its state, because a sharded model has other parameters while its weights are gathered
    own = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, nn.Parameter)}
    groups: dict[GroupLabel, list[Tensor]] = {}
    for group in components.state.optimizer.param_groups:
        members = map(components.strategy.find_parameter, group["params"])
        decay = group.get("weight_decay") if components.config.optimizer.groups else None
        label = GroupLabel(group.get("rate_factor", 1.0), decay, group.get("hidden"))
        groups.setdefault(label, []).extend(members)
    moved = {id(parameter) for parameters in groups.values() for parameter in parameters}
    still: list[Tensor] = [p for p in {id(p): p for p in own.values()}.values() if id(p) not in moved]
    if set(groups) == {GroupLabel(1.0, None, None)} and not still and not components.frozen:
        return []
    names = {id(parameter): name for name, parameter in reversed(own.items())}  # of tied ones the first
    ordered = sorted(groups, key=lambda label: (label.factor, label.hidden or False, label.weight_decay or 0))
    rows = [(label.format(peak), _describe(groups[label], names)) for label in reversed(ordered)]
    frozen = (("frozen", still), *components.frozen.items())
    return rows + [(label, _describe(parameters, names)) for label, parameters in frozen if parameters]


def _describe(parameters: Sequence[Tensor], names: dict[int, str]) -> str:
    """'2 tensors, 650 parameters: head.weight, head.bias'."""
    listed = [names[id(parameter)] for parameter in parameters[:_LISTED]]
    more = ["…"] if len(parameters) > _LISTED else []
    count = pluralize(sum(parameter.numel() for parameter in parameters), "parameter")
    return f"{pluralize(len(parameters), 'tensor')}, {count}: {', '.join([*listed, *more])}"
