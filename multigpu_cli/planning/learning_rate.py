"""The learning rate: scaling with the batch size, and the schedule over the run."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import cos, pi, sqrt
from typing import Any, NamedTuple

from multigpu_cli.errors import RequestError

BASE_LR = {"adamw": 1e-3, "sgd": 0.1}


class Rate(NamedTuple):
    """The rate at the end of warm-up, with its reason.

    Attributes:
        value: the learning rate.
        rule: given, none, linear or sqrt.
        reason: how it was computed, which the plan shows.
    """

    value: float
    rule: str
    reason: str


def resolve_learning_rate(
    *, given: float | None, base: float | None, base_batch: int, global_batch: int, rule: str, optimizer: str
) -> Rate:
    """The given rate unchanged, or the base rate scaled to the global batch.

    Linear: Goyal et al. 2017, "Accurate, Large Minibatch SGD". Square root, for Adam-family optimizers: Malladi et al.
    2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms".
    """
    if given is not None:
        return Rate(given, "given", f"{given:g} as given by --lr")
    base = BASE_LR[optimizer] if base is None else base
    if rule == "auto":
        rule = "linear" if optimizer == "sgd" else "sqrt"
    factor = {"linear": global_batch / base_batch, "sqrt": sqrt(global_batch / base_batch), "none": 1.0}[rule]
    value = base * factor
    if rule == "none":
        return Rate(value, rule, f"base rate {base:g}, not scaled")
    ratio = f"{global_batch}/{base_batch}" if rule == "linear" else f"√({global_batch}/{base_batch})"
    return Rate(value, rule, f"base rate {base:g} × {ratio} ({rule} rule) = {value:.4g}")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate of every optimizer step.

    Attributes:
        peak: the rate at the end of warm-up.
        total_steps: length of the run in optimizer steps.
        warmup_steps: linear warm-up from near zero; step `warmup_steps` is the first at the peak.
        shape: cosine and linear fall to zero, step divides by ten after one half and three quarters, constant does not
            change.
        floor: share of the peak at which cosine and linear end, and below which step does not fall.
    """

    peak: float
    total_steps: int
    warmup_steps: int
    shape: str
    floor: float = 0.0

    def rate_at(self, step: int) -> float:
        """The rate of optimizer step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / (self.warmup_steps + 1)
        done = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        done = min(done, 1.0)
        if self.shape == "cosine":
            return self.peak * (self.floor + (1 - self.floor) * 0.5 * (1 + cos(pi * done)))
        if self.shape == "linear":
            return self.peak * (self.floor + (1 - self.floor) * (1 - done))
        if self.shape == "step":
            return self.peak * max(self.floor, 1.0 if done < 0.5 else 0.1 if done < 0.75 else 0.01)
        return self.peak


def plan_schedule(
    *,
    peak: float,
    shape: str,
    steps_per_epoch: int,
    epochs: int,
    max_steps: int | None,
    warmup_epochs: float | None,
    args: Mapping[str, Any] | None = None,
) -> Schedule:
    """Compute the run's length in optimizer steps and the warm-up: as given, or min(2 epochs, 10 % of the run).

    Args:
        args: `floor`, the share of the peak at which the schedule ends (schedule.args).

    Raises:
        RequestError: a given warm-up does not end within the epochs, or an argument is unknown or invalid.
    """
    whole = steps_per_epoch * epochs
    total = whole if max_steps is None else min(whole, max_steps)
    if warmup_epochs is None:
        warmup = min(2 * steps_per_epoch, total // 10)
    else:
        warmup = round(warmup_epochs * steps_per_epoch)
        if warmup >= whole and warmup > 0:
            raise RequestError(
                f"--warmup-epochs {warmup_epochs:g}: the warm-up does not end within --epochs {epochs}",
                remedy="use a shorter warm-up, or more --epochs",
            )
    return Schedule(peak=peak, total_steps=total, warmup_steps=warmup, shape=shape, floor=_floor(args or {}))


def _floor(args: Mapping[str, Any]) -> float:
    if unknown := sorted(args.keys() - {"floor"}):
        raise RequestError(f"schedule.args.{unknown[0]}: there is no such argument", remedy="use schedule.args.floor")
    floor = args.get("floor", 0.0)
    if isinstance(floor, bool) or not isinstance(floor, int | float) or not 0 <= floor <= 1:
        raise RequestError(
            f"schedule.args.floor: must be a share of the peak rate, not {floor!r}", remedy="use a number from 0 to 1"
        )
    return float(floor)


def decay_by_depth(decay: float, depth: int, deepest: int) -> float:
    """The share of the rate at some depth of a network: 1 at the deepest, `decay` times as much a block before it.

    Clark et al. 2020, "ELECTRA"; Bao et al. 2022, "BEiT".

    Args:
        depth: 0 for what comes before the first block, to `deepest`.
    """
    return float(decay ** (deepest - depth))
