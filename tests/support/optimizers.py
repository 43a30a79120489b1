"""Optimizers as users write or import them: schedule-free, with states of all kinds, and some with a fault."""

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class ScheduleFreeSGD(torch.optim.Optimizer):
    """Defazio et al. 2024, as `SGDScheduleFree` of the package schedulefree computes it, without its warm-up.

    Between steps the parameters are y, where gradients are taken; `eval()` puts x there, the weights for use.
    """

    def __init__(self, params: Iterable[Any], lr: float, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        own = {"k": 0, "train_mode": False, "weight_sum": 0.0, "lr_max": -1.0}
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, **own})

    @torch.no_grad()
    def _move(self, *, train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != train:
                weight = 1 - group["momentum"] if train else 1 - 1 / group["momentum"]
                for parameter in group["params"]:
                    if "z" in self.state[parameter]:
                        parameter.lerp_(self.state[parameter]["z"], weight)
            group["train_mode"] = train

    def eval(self) -> None:
        self._move(train=False)

    def train(self) -> None:
        self._move(train=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["train_mode"], "a step in the mode for evaluations"
            group["lr_max"] = max(group["lr"], group["lr_max"])
            weight = group["lr_max"] ** 2
            group["weight_sum"] += weight
            share = weight / group["weight_sum"] if weight else 0.0
            for y in group["params"]:
                if y.grad is None:
                    continue
                z = self.state[y].setdefault("z", y.clone())
                gradient = y.grad + group["weight_decay"] * y
                y.lerp_(z, share)
                y.add_(gradient, alpha=group["lr"] * (group["momentum"] * (1 - share) - 1))
                z.sub_(gradient, alpha=group["lr"])
            group["k"] += 1


class Plain(torch.optim.Optimizer):
    """Gradient descent; what each class below adds to a gradient is its own."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * (parameter.grad + self.extra(parameter)))

    def extra(self, parameter: Tensor) -> Tensor | float:
        return 0.0


class Manifold(Plain):
    """Keeps tensors of several formats, nested ones, numbers and texts, some of them from its construction on."""

    def __init__(self, params: Iterable[Any], lr: float, depth: int = 2) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            for parameter in group["params"]:
                sums = [torch.zeros_like(parameter, dtype=torch.float64) for _ in range(depth)]
                self.state[parameter] = {
                    "sums": {"all": sums},
                    "count": torch.zeros((), dtype=torch.int64),
                    "name": "w",
                }

    def extra(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        state["count"] += 1
        state["last"] = float(parameter.grad.mean())  # type: ignore[union-attr]
        for each in state["sums"]["all"]:
            each += parameter.grad.double() / 3  # type: ignore[union-attr]
        first: Tensor = state["sums"]["all"][0]
        return (first * 1e-3 * float(state["last"])).to(parameter.dtype)


class Noisy(Plain):
    """Adds random numbers of torch's."""

    def extra(self, parameter: Tensor) -> Tensor:
        return torch.randn_like(parameter)


class Clocked(Plain):
    """Depends on the clock."""

    def extra(self, parameter: Tensor) -> float:
        return time.perf_counter_ns() % 1000


class Forgetful(Plain):
    """Counts its steps where no checkpoint sees them."""

    count = 0

    def extra(self, parameter: Tensor) -> float:
        self.count += 1
        return float(self.count)


class Pickled(Plain):
    """Keeps a function, which a checkpoint can't hold."""

    def extra(self, parameter: Tensor) -> float:
        self.state[parameter]["how"] = print
        return 0.0


class Closing(Plain):
    """Can't step without a closure."""

    def step(self, closure: Callable[[], float]) -> None:  # type: ignore[override]
        closure()


class Rateless(torch.optim.Optimizer):
    """Has no learning rate."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {})


def no_optimizer(params: Iterable[Any], lr: float) -> str:
    return "none"
