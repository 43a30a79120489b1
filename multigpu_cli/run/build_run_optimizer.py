"""The optimizer of a run: the user's live one, or that of the settings, which is tried before anything is written."""

from functools import partial

import torch
from torch import nn

from multigpu_cli.errors import RequestError, pluralize
from multigpu_cli.models.rate_factors import compute_rate_factors
from multigpu_cli.optimizers.build import build_optimizer, construct_optimizer
from multigpu_cli.optimizers.trial import check_optimizer
from multigpu_cli.planning.optimizer_names import OPTIMIZERS
from multigpu_cli.run.spec import RunSpec
from multigpu_cli.runtime.schedule_free import is_schedule_free
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
