"""Where dataset, model, task and optimizer of a run come from: the settings, or objects of the caller's own."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from multigpu_cli.capabilities import TASKS
from multigpu_cli.checkpoint.snapshot import TrainState
from multigpu_cli.config.code_names import NAMING, match_names
from multigpu_cli.config.schema import Config, OptimizerConfig
from multigpu_cli.config.types import quote_value
from multigpu_cli.data.load import FROM_MODEL, find_data_factory, open_data
from multigpu_cli.data.source import DataSource
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError, pluralize
from multigpu_cli.models.blocks import measure_depths
from multigpu_cli.models.build import build_model, find_adapter, suggest_outputs
from multigpu_cli.optimizers.build import build_optimizer, construct_optimizer, set_rate
from multigpu_cli.optimizers.eval_weights import is_schedule_free
from multigpu_cli.optimizers.trial import check_optimizer, measure_state_bytes
from multigpu_cli.planning.batch import BatchPlan
from multigpu_cli.planning.plan import Plan
from multigpu_cli.planning.schedule import OPTIMIZERS, Rate, decay_by_depth
from multigpu_cli.runtime import factories
from multigpu_cli.runtime.seeding import seed_weights
from multigpu_cli.strategies.base import Strategy
from multigpu_cli.tasks.base import Task

_SMOOTHED = ("classification", "multi-label", "language-model", "dpo")


@dataclass(kw_only=True)
class FromConfig:
    """Builds what a run consists of from its settings.

    A subclass may have objects in the place of what settings name, as that of the Python API has.
    """

    source: DataSource | None = None  # the dataset, where it is there already
    scheduler: LRScheduler | None = None  # moves the optimizer's rates, in place of the schedule
    ddp: Mapping[str, Any] = field(default_factory=dict)  # further arguments of DistributedDataParallel
    whole_because: str = field(default="", init=False)  # why each rank builds the whole model, with its own weights
    named: tuple[str, ...] = field(default=NAMING, init=False)  # which of data, model and task settings name
    comment: str = field(default="", init=False)  # the first lines of config.yaml

    def list_unused(self, config: Config) -> set[str]:
        """Settings of data and optimizer that have no effect."""
        return {"mode", "data_dir"} - inspect.signature(find_data_factory(config)).parameters.keys()

    def find_unread(self, config: Config, task: str) -> Iterator[RequestError]:
        """Settings that the loss does not read."""
        if config.task.label_smoothing and task in TASKS and task not in _SMOOTHED:
            names = ", ".join(_SMOOTHED)
            yield RequestError(f"--label-smoothing is for --task {names}, not {task}", remedy="--label-smoothing 0")

    def open_source(self, config: Config, moved: Callable[[], None]) -> DataSource:
        """The dataset, if it is there and valid; `moved` is called as samples are read."""
        return self.source or open_data(config, moved)

    def build_task(self, config: Config, source: DataSource) -> Task:
        """The task that the user named, else the dataset's own, with its arguments."""
        name, offered = config.task.name or source.task, {"source": source, "config": config.task}
        factory = factories.find_factory(name, TASKS, flag="--task")
        task = factories.call_factory(factory, offered, config.task.args, where="task")
        if not isinstance(task, Task):
            raise RequestError(f"--task {name}: not a subclass of multigpu_cli.tasks.base.Task")
        return task

    def build_model(self, config: Config, source: DataSource, *, reference: bool = False) -> nn.Module:
        """The model with weights drawn from the seed, the dataset's own if none was named; see `has_reference`."""
        task = config.task.name or source.task
        offered = {
            "input_shape": source.input_shape,
            "num_classes": source.num_classes or source.num_outputs,
            "task": task,
            "mode": config.data.mode,
            "seed": config.reproducibility.seed,
        } | dict(source.model_kwargs)
        if config.model.dir is not None:
            offered["model_dir"] = config.model.dir
        seed_weights(config.reproducibility.seed)
        adapt = find_adapter(config, reference=reference)
        name = config.model.name or source.model
        return build_model(config.model, name, offered, whole_output=task == FROM_MODEL, adapt=adapt)

    def describe_model(self, config: Config, source: DataSource) -> str:
        """What the model was built for."""
        args = {"input_shape": source.input_shape, "num_classes": source.num_classes or source.num_outputs}
        words = [f"{name}={quote_value(value)}" for name, value in (args | config.model.args).items()]
        return f"the model was built for {', '.join(words)}"

    def suggest_outputs(self, config: Config, source: DataSource, given: int, wanted: int) -> str:
        """The remedy for a model with `given` outputs."""
        return (
            f"{suggest_outputs(config.model.name or source.model, config.model.args, given, wanted)}, or another --task"
        )

    def build_optimizer(
        self, config: Config, plan: Plan, model: nn.Module, strategy: Strategy
    ) -> torch.optim.Optimizer:
        """The optimizer over what the strategy has this process move, tried before anything is written."""
        settings, peak, exact = config.optimizer, plan.schedule.peak, config.reproducibility.exact
        factors = compute_rate_factors(model, settings)
        optimizer = build_optimizer(model, settings, factors, strategy.local_parameters, peak)
        if exact or settings.name not in OPTIMIZERS:
            construct = partial(construct_optimizer, settings, rate=peak)
            workers = 1 if plan.strategy == "dp" else plan.batches.workers  # dp steps in one place
            check_optimizer(optimizer, construct, settings.name, exact=exact, workers=workers)
        return optimizer

    def measure_optimizer(self, config: Config, model: nn.Module) -> int:
        """Bytes of the optimizer's state, as far as they are known."""
        return measure_state_bytes(model, config.optimizer)

    def describe_optimizer(self, config: Config, model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
        """What the plan says of an optimizer other than AdamW and SGD; empty for these."""
        name = config.optimizer.name
        if name in ("adamw", "sgd"):
            return ""
        if name == "muon":
            hidden = {parameter for group in optimizer.param_groups if group["hidden"] for parameter in group["params"]}
            others = {name: p for name, p in model.named_parameters() if p.requires_grad and p not in hidden}
            matrices = ", ".join(name for name, parameter in others.items() if parameter.ndim == 2)
            rest = f"{pluralize(len(others), 'other tensor')} by AdamW{matrices and f', with the matrices {matrices}'}"
            return f"muon: {pluralize(len(hidden), 'hidden weight')} by Muon, {rest}"
        modes = "; schedule-free: evaluated and saved for use in its eval mode" if is_schedule_free(optimizer) else ""
        return f"{name}{modes}"

    def may_draw(self, config: Config) -> bool:
        """Whether the optimizer is code of the user's own, which may draw random numbers."""
        return config.optimizer.name not in OPTIMIZERS

    def explain_rate(self, config: Config, rate: Rate, batches: BatchPlan, epochs: int, steps: int) -> tuple[Rate, int]:
        """The rate with its reason, and the optimizer steps for each step of the scheduler; 0 without one.

        `steps` is the run's length, which max_steps may end before its epochs do; a scheduler for another is refused.
        """
        return rate, 0

    def set_rate(self, state: TrainState, plan: Plan, step: int) -> None:
        """Set the learning rates of optimizer step `step`, counted from 0."""
        set_rate(state.optimizer, plan.schedule.rate_at(step))

    def check_restored(self, plan: Plan) -> None:
        """The checkpoint, if there is one, is loaded: refuse a scheduler that ends before the run, or elsewhere now."""

    def adopt_weights(self, folder: str, world: World) -> None:
        """The folder has a completed run: its weights become those of the caller's model."""


def compute_rate_factors(model: nn.Module, config: OptimizerConfig) -> dict[str, float]:
    """What the rate is multiplied by, for each parameter that learns.

    The product of: the share of the part that the network's own `rate_factors` names by how its parameters begin, each
    pattern of optimizer.rates and each group of optimizer.groups that matches the name, and optimizer.layer_decay.
    RequestError: a pattern that matches nothing that learns, or no blocks for the decay.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    parts: dict[str, float] = getattr(model, "rate_factors", {})
    factors = {name: next((parts[part] for part in parts if name.startswith(part)), 1.0) for name in names}
    for pattern in sorted(config.rates):  # a fixed order, so that a product has the same bits however it is written
        for name in match_names(names, pattern, f"optimizer.rates {pattern!r}", "parameter that learns"):
            factors[name] *= config.rates[pattern]
    for group in config.groups:
        for name in match_names(names, group["match"], f"optimizer.groups {group['match']!r}", "parameter that learns"):
            factors[name] *= group.get("lr_factor", 1.0)
    if config.layer_decay is not None:
        depths = measure_depths(model)
        deepest = max(depths.values())
        if not deepest:
            raise RequestError(
                f"optimizer.layer_decay {config.layer_decay:g}: the model has no repeated blocks to count",
                remedy="optimizer.rates, with patterns of your own",
            )
        for name in names:
            factors[name] *= decay_by_depth(config.layer_decay, depths[name], deepest)
    return factors
