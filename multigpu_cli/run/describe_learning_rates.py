"""Which parameters learn at which rate: a table beside the plan, where that is more than one rate for all."""

from collections.abc import Sequence

from torch import Tensor, nn

from multigpu_cli.errors import pluralize
from multigpu_cli.run.components import TrainComponents

_LISTED = 3  # names in a line


def describe_groups(components: TrainComponents) -> list[tuple[str, str]]:
    """Label and value of a line for each rate, the highest first, and for what is frozen; [] where all is alike."""
    model, peak = components.state.model, components.plan.schedule.peak
    # from its state, because a sharded model has other parameters while its weights are gathered
    own = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, nn.Parameter)}
    groups: dict[float, list[Tensor]] = {}
    for group in components.state.optimizer.param_groups:
        members = map(components.strategy.find_parameter, group["params"])
        groups.setdefault(group.get("rate_factor", 1.0), []).extend(members)
    moved = {id(parameter) for parameters in groups.values() for parameter in parameters}
    still: list[Tensor] = [p for p in {id(p): p for p in own.values()}.values() if id(p) not in moved]
    if set(groups) == {1.0} and not still and not components.frozen:
        return []
    names = {id(parameter): name for name, parameter in reversed(own.items())}  # of tied ones the first
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
