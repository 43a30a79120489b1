"""Optimizers by name: parameter groups, fused kernels, and the rate that the schedule sets."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from multigpu_cli.config.schema import OptimizerConfig
from multigpu_cli.errors import RequestError
from multigpu_cli.runtime import plugins

_KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
}


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW or SGD with Nesterov momentum 0.9; weight decay on matrices and kernels only, not on biases and norms.

    Raises:
        RequestError: optimizer.args that torch's optimizer does not take.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    kind, offered = _KINDS[config.name]
    if taken := sorted(config.args.keys() & {"lr", "params", "weight_decay"}):
        raise RequestError(f"optimizer.args.{taken[0]} is not for you to give", remedy="--lr and --weight-decay")
    optimizer: torch.optim.Optimizer = plugins.call(
        kind, {"params": groups, "lr": 0.0, "fused": True, **offered}, config.args, where="optimizer"
    )
    if optimizer.defaults.get("momentum"):
        for parameter in trained:  # or the first step makes them, of uninitialised memory where that step is skipped
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group the schedule's rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def averaged(model: nn.Module, decay: float) -> AveragedModel:
    """An exponential moving average of weights and buffers; the decay itself warms up as (1+n)/(10+n).

    Without that, a short run would be averaged with its random start (Adam's bias, seen in weights).
    """
    shadow = AveragedModel(model, multi_avg_fn=_Average(decay), use_buffers=True)
    shadow.requires_grad_(False)
    return shadow


_Tensors = list[Tensor] | tuple[Tensor, ...]


class _Average:
    def __init__(self, decay: float) -> None:
        self.decay = decay

    @torch.no_grad()
    def __call__(self, shadows: _Tensors, values: _Tensors, updates: Tensor | int) -> None:
        count = int(updates)  # a CPU tensor, also where the model is on a GPU
        decay = min(self.decay, (1 + count) / (10 + count))
        if shadows[0].is_floating_point():
            torch._foreach_lerp_(shadows, values, 1 - decay)
        else:
            torch._foreach_copy_(shadows, values)
