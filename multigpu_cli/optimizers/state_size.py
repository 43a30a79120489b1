"""Measures what an optimizer keeps for each weight, on small weights."""

from math import prod

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from multigpu_cli.config.schema import OptimizerConfig
from multigpu_cli.optimizers.build import build_optimizer, set_rate

_LENGTHS = (3, 5, 7, 11, 13, 17, 19, 23)  # of a small weight's dimensions: primes, so that products tell them too


def measure_state_bytes(model: nn.Module, config: OptimizerConfig) -> int:
    """Bytes of the optimizer's state after its first step on the model; single numbers are not counted.

    Raises:
        RequestError: the optimizer can't be built.
    """
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    small = [nn.Parameter(torch.ones(_LENGTHS[: parameter.ndim], dtype=parameter.dtype)) for parameter in learning]
    optimizer = build_optimizer(model, config, moved=small, rate=1e-3)
    set_rate(optimizer, 1e-3)
    for parameter in small:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    pairs = zip(learning, small, strict=True)
    return sum(_scale(value, parameter) for parameter, tried in pairs for value in _list_tensors(optimizer, tried))


def _list_tensors(optimizer: torch.optim.Optimizer, parameter: Tensor) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(dict(optimizer.state.get(parameter, {}))) if isinstance(leaf, Tensor)]


def _scale(value: Tensor, parameter: Tensor) -> int:
    """The bytes that a state of a small weight has for the parameter: its rows are that weight's rows, and so on."""
    shape = parameter.shape
    lengths = dict(zip(_LENGTHS, shape, strict=False))
    lengths |= {prod(_LENGTHS[:count]): prod(shape[:count]) for count in range(2, len(shape) + 1)}
    return value.element_size() * prod(lengths.get(length, length) for length in value.shape) if value.ndim else 0
