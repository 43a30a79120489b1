"""Whether an optimizer's step on some rows of a weight is that of its step on the whole, which sharding relies on."""

from collections import defaultdict
from copy import copy
from typing import Any

import torch
from torch import Tensor

from multigpu_cli.errors import RequestError

_ROWS, _STEPS = 6, 3


def check_is_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Try the optimizer on a small weight, whole and in two pieces, with the settings of each of its groups.

    Raises:
        RequestError: the results differ: it needs whole weights, as Muon, LAMB and Adafactor do.
    """
    for group in filter(lambda each: each["params"], optimizer.param_groups):
        shape = (_ROWS, 4) if any(parameter.ndim > 1 for parameter in group["params"]) else (_ROWS,)
        like: Tensor = group["params"][0]
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randn(shape, generator=generator).to(like.device, like.dtype) for _ in range(1 + _STEPS)]
        whole = _optimize(optimizer, group, drawn)
        pieces = [_optimize(optimizer, group, list(part)) for part in zip(*(d.chunk(2) for d in drawn), strict=True)]
        if not torch.allclose(torch.cat(pieces), whole, rtol=1e-3, atol=1e-5):
            raise RequestError(
                f"--multi-gpu fsdp: each worker has only some rows of a weight, and {type(optimizer).__name__} needs "
                "all of them: its step on two pieces is another than on the whole",
                remedy="an optimizer that treats each number by itself, such as AdamW or SGD, or --multi-gpu ddp",
            )


def _optimize(optimizer: torch.optim.Optimizer, group: dict[str, Any], drawn: list[Tensor]) -> Tensor:
    """A weight after some steps of a copy of the optimizer.

    Args:
        drawn: the weight and its gradients.
    """
    weight = torch.nn.Parameter(drawn[0].clone())
    trial = copy(optimizer)
    trial.state = defaultdict(dict)
    if initial := _resize_state(optimizer.state.get(group["params"][0], {}), group["params"][0], weight):
        trial.state[weight] = initial
    trial.param_groups = [group | {"params": [weight], "lr": 0.01}]
    for gradient in drawn[1:]:
        weight.grad = gradient.clone()
        type(optimizer).step(trial)  # not `trial.step`, which a scheduler may have replaced by one for the original
    return weight.detach()


def _resize_state(state: dict[str, Any], parameter: Tensor, weight: Tensor) -> dict[str, Any]:
    """What an optimizer has put into the state of a parameter already, as Adagrad's constructor does, for the weight.

    Tensors of the parameter's shape are filled with their first number.

    Returns:
        {} if there are other tensors, as Adafactor has after its first step: the optimizer makes them anew.
    """
    resized = {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            resized[key] = value
        elif value.ndim == 0:
            resized[key] = value.clone()
        elif value.shape == parameter.shape:
            first = value.flatten()[0].item() if value.numel() else 0  # a worker may have no row of a short weight
            resized[key] = torch.full_like(weight, first, dtype=value.dtype)
        else:
            return {}
    return resized
