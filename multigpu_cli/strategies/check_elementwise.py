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
    trial.param_groups = [group | {"params": [weight], "lr": 0.01}]
    for gradient in drawn[1:]:
        weight.grad = gradient.clone()
        type(optimizer).step(trial)  # not `trial.step`, which a scheduler may have replaced by one for the original
    return weight.detach()
