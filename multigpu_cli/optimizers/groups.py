"""Parameter groups: what learns at the same rate, with the same weight decay and by the same algorithm."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from multigpu_cli.config.match_names import match_names
from multigpu_cli.config.schema import OptimizerConfig


class GroupKey(NamedTuple):
    """What the parameters of a group have in common.

    Attributes:
        factor: their share of the schedule's rate.
        is_matrix: they have two dimensions or more.
        weight_decay: of each step.
        hidden: Muon moves them; None where there is one algorithm for all.
    """

    factor: float
    is_matrix: bool
    weight_decay: float
    hidden: bool | None


def group_parameters(
    trained: Mapping[str, Tensor],
    config: OptimizerConfig,
    factors: Mapping[str, float],
    hidden: Collection[str] | None,
) -> list[dict[str, Any]]:
    """Parameter groups by share of the rate, the full rate first, and matrices before the others.

    Matrices and kernels decay, biases and norms do not, unless optimizer.groups says otherwise. Checkpoints hold the
    optimizer's state in this order.

    Args:
        factors: name of a parameter → what its rate is multiplied by, where that is not 1.
        hidden: the names of what Muon moves; None: one algorithm moves all.

    Raises:
        RequestError: a pattern matches nothing that learns.
    """
    decays = _compute_decays(trained, config)
    groups: dict[GroupKey, list[Tensor]] = {}
    if hidden is None:
        groups = {GroupKey(1.0, matrix, config.weight_decay * matrix, None): [] for matrix in (True, False)}
    for name, parameter in trained.items():
        by_muon = None if hidden is None else name in hidden
        key = GroupKey(factors.get(name, 1.0), parameter.ndim >= 2, decays[name], by_muon)
        groups.setdefault(key, []).append(parameter)
    return [
        {"params": members, "weight_decay": key.weight_decay}
        | ({"rate_factor": key.factor} if key.factor != 1 else {})
        | ({} if key.hidden is None else {"hidden": key.hidden})
        for key, members in groups.items()
        if members
    ]


def _compute_decays(trained: Mapping[str, Tensor], config: OptimizerConfig) -> dict[str, float]:
    """The weight decay of each parameter; of the groups that match one, the last that has any counts."""
    decays = {name: config.weight_decay if parameter.ndim >= 2 else 0.0 for name, parameter in trained.items()}
    for group in config.groups:
        chosen = match_names(
            list(trained), group["match"], f"optimizer.groups {group['match']!r}", "parameter that learns"
        )
        if "weight_decay" in group:
            decays.update(dict.fromkeys(chosen, float(group["weight_decay"])))
    return decays
