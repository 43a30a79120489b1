"""Which parameters learn at which rate and decay: a table beside the plan, where that is more than the usual."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from multigpu_cli.errors import pluralize
from multigpu_cli.run.components import TrainComponents

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
