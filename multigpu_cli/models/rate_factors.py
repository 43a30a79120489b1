"""What the learning rate of each parameter is multiplied by: by pattern, by depth, and as the network itself says."""

from torch import nn

from multigpu_cli.config.match_names import match_names
from multigpu_cli.config.schema import OptimizerConfig
from multigpu_cli.errors import RequestError
from multigpu_cli.models.depth import measure_depths
from multigpu_cli.planning.learning_rate import decay_by_depth


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
