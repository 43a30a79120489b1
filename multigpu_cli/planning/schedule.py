"""The learning rate: the rate and scaling that suit each optimizer, by name, and the schedule over the run.

Optimizers are those of torch.optim that step by gradients alone. Their `rate` is for a batch of 32 samples (--base-lr).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import cos, isfinite, pi, sqrt
from typing import Any, NamedTuple

from multigpu_cli.errors import RequestError


class KnownOptimizer(NamedTuple):
    """What is known of an optimizer."""

    class_name: str  # in torch.optim
    rate: float  # the learning rate that suits the base batch
    scaling: str  # how the rate grows with the global batch: linear, sqrt or none
    needs_whole_weights: bool = False  # its step on some rows of a weight is not that of its step on the whole


OPTIMIZERS: dict[str, KnownOptimizer] = {
    "adamw": KnownOptimizer("AdamW", 1e-3, "sqrt"),
    "sgd": KnownOptimizer("SGD", 0.1, "linear"),
    "adam": KnownOptimizer("Adam", 1e-3, "sqrt"),
    "nadam": KnownOptimizer("NAdam", 2e-3, "sqrt"),
    "radam": KnownOptimizer("RAdam", 1e-3, "sqrt"),
    "adamax": KnownOptimizer("Adamax", 2e-3, "sqrt"),
    "rmsprop": KnownOptimizer("RMSprop", 1e-3, "sqrt"),
    "adagrad": KnownOptimizer("Adagrad", 0.01, "none"),
    "adadelta": KnownOptimizer("Adadelta", 1.0, "none"),
    "adafactor": KnownOptimizer("Adafactor", 0.01, "none", needs_whole_weights=True),
    "muon": KnownOptimizer("Muon", 1e-3, "sqrt", needs_whole_weights=True),
}
"""Rates: Goyal et al. 2017 for sgd (0.1 for 256 samples there), Hinton's lecture 6e for rmsprop, torch's own defaults
for the others; muon's steps are as large as AdamW's (Liu et al. 2025). Scaling: linear by Goyal et al. 2017, "Accurate,
Large Minibatch SGD"; square root by Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient
Algorithms", who derive it for Adam and RMSprop; none where no rule is published."""

REFUSED = {  # names of torch.optim that are no choice here, each with the reason
    "lbfgs": "it evaluates the loss several times in a step (a closure), and a step here has one gradient",
    "sparseadam": "it takes sparse gradients only, and gradients here are dense",
    "rprop": "it takes the learning rate in its first step only, so no schedule can set it; try rmsprop",
    "asgd": "torch evaluates nothing with its averaged weights; try sgd with --ema",
}


def find_rate(name: str) -> float | None:
    """The learning rate that suits the base batch; None for an optimizer of the user's own."""
    return OPTIMIZERS[name].rate if name in OPTIMIZERS else None


SHAPES = ("cosine", "linear", "constant", "step", "wsd")
_CHECKED = 1000  # steps of a user's own schedule that are computed before the run, evenly spread

ScheduleFunction = Callable[[int, int], float]
"""A user's own schedule: step, counted from 0, and total steps → what the peak rate is multiplied by."""


class Rate(NamedTuple):
    """The rate at the end of warm-up, with its reason."""

    value: float  # the learning rate
    rule: str  # given, none, linear or sqrt
    reason: str  # how it was computed, which the plan shows


def resolve_learning_rate(
    *, given: float | None, base: float | None, base_batch: int, global_batch: int, rule: str, optimizer: str
) -> Rate:
    """The given rate unchanged, or the base rate scaled to the global batch; RequestError: none is given or known."""
    if given is not None:
        return Rate(given, "given", f"{given:g} as given by --lr")
    base = find_rate(optimizer) if base is None else base
    if base is None:
        problem = f"--optimizer {optimizer}: no default learning rate is known for it"
        raise RequestError(problem, remedy="give --lr, or --base-lr with --lr-scaling linear, sqrt or none")
    asked = rule
    if rule == "auto":
        rule = OPTIMIZERS[optimizer].scaling if optimizer in OPTIMIZERS else "none"
    value = base * {"linear": global_batch / base_batch, "sqrt": sqrt(global_batch / base_batch), "none": 1.0}[rule]
    if rule == "none":
        reason = f": no rule is known for {optimizer}" if asked == "auto" else ""
        return Rate(value, rule, f"base rate {base:g}, not scaled{reason}")
    ratio = f"{global_batch}/{base_batch}" if rule == "linear" else f"√({global_batch}/{base_batch})"
    return Rate(value, rule, f"base rate {base:g} × {ratio} ({rule} rule) = {value:.4g}")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate of every optimizer step.

    The shapes cosine and linear fall to zero, step divides by ten after one half and three quarters, constant does not
    change; wsd stays at the peak until its decay: a share of the run in which it falls by 1 - sqrt of what of it is
    done (Hägele et al. 2024, "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations"; the schedule
    is that of Hu et al. 2024, "MiniCPM"). `function` has a shape of its own name.
    """

    peak: float  # the rate at the end of warm-up
    total_steps: int  # length of the run in optimizer steps
    warmup_steps: int  # linear warm-up from near zero; step `warmup_steps` is the first at the peak
    shape: str
    floor: float = 0.0  # share of the peak at which cosine, linear and wsd end, and below which step does not fall
    decay: float = 0.2
    function: ScheduleFunction | None = None  # the user's own

    def rate_at(self, step: int) -> float:
        """The rate of optimizer step `step`, counted from 0; a RequestError where the user's own function fails."""
        if self.function:
            return self.peak * self._compute_factor(self.function, step)
        if step < self.warmup_steps:
            return self.peak * (step + 1) / (self.warmup_steps + 1)
        done = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        if self.shape == "cosine":
            return self.peak * (self.floor + (1 - self.floor) * 0.5 * (1 + cos(pi * done)))
        if self.shape == "linear":
            return self.peak * (self.floor + (1 - self.floor) * (1 - done))
        if self.shape == "step":
            return self.peak * max(self.floor, 1.0 if done < 0.5 else 0.1 if done < 0.75 else 0.01)
        if self.shape == "wsd":
            begin = max(float(self.warmup_steps), (1 - self.decay) * self.total_steps)
            falls = begin < min(step, self.total_steps)
            fallen = min(1.0, (step - begin) / (self.total_steps - begin)) if falls else 0.0
            return self.peak * (self.floor + (1 - self.floor) * (1 - sqrt(fallen)))
        return self.peak

    def _compute_factor(self, function: ScheduleFunction, step: int) -> float:
        where = f"--schedule {self.shape}: its factor of step {step} of {self.total_steps}"
        try:
            factor = function(step, self.total_steps)
        except Exception as error:  # the user's own code may raise anything
            raise RequestError(f"{where} raised {type(error).__name__}: {error}") from error
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not isfinite(factor) or factor < 0:
            problem = f"{where} is {factor!r}"
            raise RequestError(problem, remedy="return a finite number of at least 0, such as 1.0 for the peak rate")
        return float(factor)

    def check(self) -> None:
        """Compute rates of the whole run twice, in both directions: they must depend on step and total alone."""
        if not self.function:
            return
        steps = sorted({number * (self.total_steps - 1) // (_CHECKED - 1) for number in range(_CHECKED)})
        rates = {step: self.rate_at(step) for step in steps}
        for step in reversed(steps):
            if self.rate_at(step) != rates[step]:
                problem = f"--schedule {self.shape}: it returned two different factors for step {step}"
                remedy = "use step and total only: a resumed run calls it from where it continues"
                raise RequestError(problem, remedy=remedy)


def plan_schedule(
    *,
    peak: float,
    shape: str,
    steps_per_epoch: int,
    epochs: int,
    max_steps: int | None,
    warmup_epochs: float | None,
    args: Mapping[str, Any] | None = None,
    function: ScheduleFunction | None = None,
) -> Schedule:
    """Compute the run's length in optimizer steps and the warm-up: as given, or min(2 epochs, 10 % of the run).

    `args` are `floor` and `decay` of `Schedule` (schedule.args); a function of the user's own has its arguments, and
    its own warm-up. RequestError: a given warm-up does not end within the epochs, or an argument is unknown or invalid.
    """
    whole = steps_per_epoch * epochs
    total = whole if max_steps is None else min(whole, max_steps)
    if warmup_epochs is None:
        warmup = 0 if function else min(2 * steps_per_epoch, total // 10)
    else:
        warmup = round(warmup_epochs * steps_per_epoch)
        if warmup >= whole:
            problem = f"--warmup-epochs {warmup_epochs:g}: the warm-up does not end within --epochs {epochs}"
            raise RequestError(problem, remedy="use a shorter warm-up, or more --epochs")
    shares = {} if function else _parse_shares(shape, args or {})
    schedule = Schedule(peak=peak, total_steps=total, warmup_steps=warmup, shape=shape, function=function, **shares)
    schedule.check()
    return schedule


def _parse_shares(shape: str, args: Mapping[str, Any]) -> dict[str, float]:
    """The arguments of the schedules by name: shares of the peak rate, or of the run."""
    known = ["floor", "decay"] if shape == "wsd" else ["floor"]
    if unknown := sorted(args.keys() - set(known)):
        problem = f"schedule.args.{unknown[0]}: --schedule {shape} has no such argument"
        raise RequestError(problem, remedy="use " + " or ".join(f"schedule.args.{name}" for name in known))
    for name, share in args.items():
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            of = "the peak rate" if name == "floor" else "the run"
            problem = f"schedule.args.{name}: must be a share of {of}, not {share!r}"
            raise RequestError(problem, remedy="use a number from 0 to 1")
    return {name: float(share) for name, share in args.items()}


def decay_by_depth(decay: float, depth: int, deepest: int) -> float:
    """The share of the rate at a depth from 0, before the first block: 1 at the deepest, `decay` of the next before it.

    Clark et al. 2020, "ELECTRA"; Bao et al. 2022, "BEiT".
    """
    return float(decay ** (deepest - depth))
