"""The optimizer of a run and its learning rates: the user's live ones, or those of the settings."""

from collections.abc import Callable, Collection, Iterable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, LRScheduler, OneCycleLR, SequentialLR

from multigpu_cli.config.code_names import match_names
from multigpu_cli.config.schema import OptimizerConfig
from multigpu_cli.errors import RequestError, pluralize
from multigpu_cli.models.blocks import measure_depths
from multigpu_cli.optimizers.build import build_optimizer, construct_optimizer
from multigpu_cli.optimizers.eval_weights import is_schedule_free
from multigpu_cli.optimizers.trial import check_optimizer
from multigpu_cli.planning.batch import BatchPlan
from multigpu_cli.planning.optimizer_names import OPTIMIZERS
from multigpu_cli.planning.schedule import decay_by_depth
from multigpu_cli.run.assembly.components import TrainComponents
from multigpu_cli.run.request.spec import RunSpec
from multigpu_cli.strategies.base import Strategy


def build_run_optimizer(spec: RunSpec, model: nn.Module, strategy: Strategy) -> torch.optim.Optimizer:
    """The optimizer, over what the strategy has this process move.

    One of the user's own, or one that has to be exact, is tried on small weights first.

    Raises:
        RequestError: it can't be built, or fails the trial.
    """
    live = spec.user_objects
    optimizer = (live and live.prepare_optimizer(model)) or _build_by_name(spec, model, strategy)
    if not is_schedule_free(optimizer):
        return optimizer
    optimizer.train()  # type: ignore[attr-defined]  # a live one may be in the other mode
    if spec.config.optimizer.ema != "off":
        raise RequestError(
            f"--ema together with {type(optimizer).__name__}: a schedule-free optimizer averages by itself",
            remedy="leave out one of them",
        )
    if strategy.sharded and spec.config.device.reshard == "step":
        raise RequestError(
            f"--reshard step together with {type(optimizer).__name__}: weights that an evaluation gathered would stay "
            "for the next step, and those of a schedule-free optimizer are others",
            remedy="--reshard forward",
        )
    return optimizer


def _build_by_name(spec: RunSpec, model: nn.Module, strategy: Strategy) -> torch.optim.Optimizer:
    config, peak, exact = spec.config.optimizer, spec.plan.schedule.peak, spec.config.reproducibility.exact
    optimizer = build_optimizer(model, config, compute_rate_factors(model, config), strategy.trained, peak)
    if exact or config.name not in OPTIMIZERS:
        construct = partial(construct_optimizer, config, rate=peak)
        workers = 1 if spec.placement.strategy == "dp" else spec.plan.batches.workers  # dp steps in one place
        check_optimizer(optimizer, construct, config.name, exact=exact, workers=workers)
    return optimizer


def describe_optimizer(spec: RunSpec, model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """What the plan says of an optimizer other than AdamW and SGD; empty for these, and for a live one."""
    name, live = spec.config.optimizer.name, spec.user_objects
    if (live and live.optimizer) or name in ("adamw", "sgd"):
        return ""
    if name == "muon":
        hidden = {parameter for group in optimizer.param_groups if group["hidden"] for parameter in group["params"]}
        others = {name: p for name, p in model.named_parameters() if p.requires_grad and p not in hidden}
        matrices = ", ".join(name for name, parameter in others.items() if parameter.ndim == 2)
        by_adamw = f"{pluralize(len(others), 'other tensor')} by AdamW{matrices and f', with the matrices {matrices}'}"
        return f"muon: {pluralize(len(hidden), 'hidden weight')} by Muon, {by_adamw}"
    modes = "; schedule-free: evaluated and saved for use in its eval mode" if is_schedule_free(optimizer) else ""
    return f"{name}{modes}"


_LISTED = 3  # names in a line


class GroupLabel(NamedTuple):
    """What the table says of a group.

    Attributes:
        factor: its share of the schedule's rate.
        weight_decay: None where optimizer.groups is not given.
        hidden: moved by Muon; None with any other optimizer.
    """

    factor: float
    weight_decay: float | None
    hidden: bool | None

    def format(self, peak: float) -> str:
        rate = f"{peak * self.factor:.4g}" + (f" (× {self.factor:.4g})" if self.factor != 1 else "")
        decay = "" if self.weight_decay is None else f", decay {self.weight_decay:g}"
        return rate + decay + ("" if self.hidden is None else ", Muon" if self.hidden else ", AdamW")


def describe_groups(components: TrainComponents) -> list[tuple[str, str]]:
    """Label and value of a line for each group, the highest rate first, and for what is frozen; [] where all is alike.

    The weight decay is shown with optimizer.groups, and the algorithm with --optimizer muon.
    """
    model, peak = components.state.model, components.plan.schedule.peak
    # from its state, because a sharded model has other parameters while its weights are gathered
    own = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, nn.Parameter)}
    groups: dict[GroupLabel, list[Tensor]] = {}
    for group in components.state.optimizer.param_groups:
        members = map(components.strategy.find_parameter, group["params"])
        groups.setdefault(_label(components, group), []).extend(members)
    moved = {id(parameter) for parameters in groups.values() for parameter in parameters}
    still: list[Tensor] = [p for p in {id(p): p for p in own.values()}.values() if id(p) not in moved]
    if set(groups) == {GroupLabel(1.0, None, None)} and not still and not components.frozen:
        return []
    names = {id(parameter): name for name, parameter in reversed(own.items())}  # of tied ones the first
    ordered = sorted(groups, key=lambda label: (label.factor, label.hidden or False, label.weight_decay or 0))
    rows = [(label.format(peak), _describe(groups[label], names)) for label in reversed(ordered)]
    frozen = (("frozen", still), *components.frozen.items())
    return rows + [(label, _describe(parameters, names)) for label, parameters in frozen if parameters]


def _label(components: TrainComponents, group: dict[str, Any]) -> GroupLabel:
    decay = group.get("weight_decay") if components.config.optimizer.groups else None
    return GroupLabel(group.get("rate_factor", 1.0), decay, group.get("hidden"))


def _describe(parameters: Sequence[Tensor], names: dict[int, str]) -> str:
    """'2 tensors, 650 parameters: head.weight, head.bias'."""
    listed = [names[id(parameter)] for parameter in parameters[:_LISTED]]
    more = ["…"] if len(parameters) > _LISTED else []
    count = pluralize(sum(parameter.numel() for parameter in parameters), "parameter")
    return f"{pluralize(len(parameters), 'tensor')}, {count}: {', '.join([*listed, *more])}"


def compute_rate_factors(model: nn.Module, config: OptimizerConfig) -> dict[str, float]:
    """What the rate is multiplied by, for each parameter that learns.

    The product of: the share of the part that the network's own `rate_factors` names by how its parameters begin, each
    pattern of optimizer.rates and each group of optimizer.groups that matches the name, and optimizer.layer_decay.

    Raises:
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


_ENDS = {
    OneCycleLR: "total_steps",
    lr_scheduler.CosineAnnealingLR: "T_max",
    lr_scheduler.CosineAnnealingWarmRestarts: "T_0",
    lr_scheduler.PolynomialLR: "total_iters",
    lr_scheduler.LinearLR: "total_iters",
}
_ENDS_NOWHERE_ELSE = (OneCycleLR, LambdaLR)  # others may go on after their end, or be cut off before it
_UNDERFLOW = 1e-12  # an exponential reaches zero too, long after it has become as good as zero


def choose_interval(scheduler: LRScheduler, epochs: int, steps: int, batches: BatchPlan) -> str:
    """'step' or 'epoch'.

    Args:
        steps: length of the run in optimizer steps; max_steps may end it before its epochs do.

    Raises:
        RequestError: it was made for another number of steps.
    """
    whole, alone = epochs * batches.steps_per_epoch, _count_steps_alone(epochs, batches)
    length = _find_length(scheduler, sorted({epochs, steps, whole} | alone))
    if length is None:
        return "step" if _counts_steps(scheduler) else "epoch"
    if length != epochs and length in (steps, whole):
        return "step"
    if length == epochs or not (length in alone or isinstance(scheduler, _ENDS_NOWHERE_ELSE)):
        return "epoch"
    raise RequestError(
        f"scheduler: {type(scheduler).__name__} is made for {pluralize(length, 'step')}, and the run has "
        f"{pluralize(steps, 'optimizer step')} of up to {pluralize(batches.global_batch, 'sample')} in "
        f"{pluralize(epochs, 'epoch')}",
        remedy=f"make it for {steps} steps (global_batch_size keeps their number on any number of workers), or for "
        f"{epochs}, to step it once an epoch; or scheduler_step='step' or 'epoch', to step it as it is",
    )


def refuse_early_end(scheduler: LRScheduler, calls: int) -> None:
    """Refuse a scheduler, as made or as a checkpoint has it, that would raise an error during the run.

    Raises:
        RequestError: it ends before it is stepped so often.
    """
    if isinstance(scheduler, OneCycleLR) and calls > scheduler.total_steps:
        raise RequestError(
            f"scheduler: OneCycleLR has {scheduler.total_steps} steps, and the run steps it {calls} times",
            remedy=f"OneCycleLR(total_steps={calls + 1}); a resumed run has its checkpoint's, and its length",
        )


def _count_steps_alone(epochs: int, batches: BatchPlan) -> set[int]:
    """How many optimizer steps one process would have by the length of its loader, with and without accumulation."""
    whole, rest = divmod(batches.samples, batches.micro_batch)
    loader, each = whole + bool(rest and not batches.drop_last), batches.accumulation
    return {epochs * loader, epochs * loader // each, epochs * (loader // each), epochs * -(-loader // each)}


def _find_length(scheduler: LRScheduler, expected: Collection[int]) -> int | None:
    """After how many of its steps a scheduler is at its end; None where none shows."""
    match scheduler:
        case SequentialLR():
            before = int(scheduler._milestones[-1])
            last = _find_length(scheduler._schedulers[-1], [number - before for number in expected])
            return None if last is None else before + last
        case ChainedScheduler():
            lengths = [_find_length(each, expected) for each in scheduler._schedulers]
            return next((length for length in lengths if length in expected), None)
        case LambdaLR():
            return next(filter(None, (_find_zero(factor, expected) for factor in scheduler.lr_lambdas)), None)
    return next((int(getattr(scheduler, name)) for kind, name in _ENDS.items() if isinstance(scheduler, kind)), None)


def _counts_steps(scheduler: LRScheduler) -> bool:
    """Whether it has no end and counts optimizer steps: CyclicLR, and warm-ups of transformers."""
    lambdas = scheduler.lr_lambdas if isinstance(scheduler, LambdaLR) else []
    return isinstance(scheduler, lr_scheduler.CyclicLR) or any(
        "num_warmup_steps" in getattr(each, "keywords", {}) for each in lambdas
    )


def _find_zero(factor: Callable[[int], float], expected: Iterable[int]) -> int | None:
    """The step at which a factor becomes zero: at one that is expected (a cosine rises again), or from there on."""
    if named := getattr(factor, "keywords", {}).get("num_training_steps"):  # of transformers' schedules
        return int(named)
    try:
        factor = deepcopy(factor)  # an object may count its calls
        if found := next((step for step in expected if step > 0 and factor(step) <= 0 < factor(step - 1)), None):
            return found
        high = next((2**power for power in range(1, 40) if factor(2**power) <= 0), 0)
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if factor(middle) <= 0 else (middle, high)
        return high if high and factor(low) > _UNDERFLOW else None
    except Exception:  # the user's own code may raise anything, such as at the end of a table: no end shows
        return None
