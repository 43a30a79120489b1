"""Which parameters learn at which rate: a table beside the plan, where that is more than one rate for all."""

from collections.abc import Sequence

from torch import Tensor

from multigpu_cli.errors import pluralize
from multigpu_cli.run.components import TrainComponents

_LISTED = 3  # names in a line


def describe_groups(components: TrainComponents) -> list[tuple[str, str]]:
    """Label and value of a line for each rate, the highest first, and for what is frozen; [] where all is alike."""
    model, peak = components.state.model, components.plan.schedule.peak
    groups: dict[float, list[Tensor]] = {}
    for group in components.state.optimizer.param_groups:
        members = map(components.strategy.find_parameter, group["params"])
        groups.setdefault(group.get("rate_factor", 1.0), []).extend(members)
    moved = {id(parameter) for parameters in groups.values() for parameter in parameters}
    still: list[Tensor] = [parameter for parameter in model.parameters() if id(parameter) not in moved]
    if set(groups) == {1.0} and not still and not components.frozen:
        return []
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    rows = [
        (f"{peak * factor:.4g}" + (f" (× {factor:.4g})" if factor != 1 else ""), _describe(groups[factor], names))
        for factor in sorted(groups, reverse=True)
    ]
    until = f"frozen until epoch {components.config.model.unfreeze_at}"
    frozen = (("frozen", still), (until, components.frozen))
    return rows + [(label, _describe(parameters, names)) for label, parameters in frozen if parameters]


def _describe(parameters: Sequence[Tensor], names: dict[int, str]) -> str:
    """'2 tensors, 650 parameters: head.weight, head.bias'."""
    listed = [names[id(parameter)] for parameter in parameters[:_LISTED]]
    more = ["…"] if len(parameters) > _LISTED else []
    count = pluralize(sum(parameter.numel() for parameter in parameters), "parameter")
    return f"{pluralize(len(parameters), 'tensor')}, {count}: {', '.join([*listed, *more])}"
