"""Your own: --optimizer own_optimizer:Lion --lr 3e-4 --schedule own_optimizer:triangle, in the folder of this file."""

from collections.abc import Iterable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    def __init__(self, params: Iterable[Any], lr: float, beta: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in (weight for weight in group["params"] if weight.grad is not None):
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(group["lr"] * momentum.lerp(weight.grad, 1 - group["beta"]).sign())
                momentum.lerp_(weight.grad, 0.01)


def triangle(step: int, total: int) -> float:
    """The share of the peak rate: up in the first half of the steps, down in the second."""
    return 1 - abs(2 * (step + 1) / (total + 1) - 1)
