"""Optimizers by name: parameter groups, fused kernels, and the rate that the schedule sets."""

import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from multigpu_cli.config.schema import OptimizerConfig
from multigpu_cli.errors import RequestError
from multigpu_cli.runtime import factories

_DISABLED = "__dynamo_disable"  # the attribute in which torch stores a method that is not compiled


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW without the checks that its `step` repeats each time: the same kernel, less CPU time.

    The state is torch's own, so checkpoints go both ways; `found_inf` skips a step on the device, and `grad_scale`
    divides the gradients, as they do there.
    """

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step over the parameters with a gradient; torch's own `step` does the first, which creates the state."""
        moved = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        special = any(group[name] for group in self.param_groups for name in ("amsgrad", "maximize", "differentiable"))
        if closure is not None or special or any(p not in self.state for parameters in moved for p in parameters):
            _first_step(self, closure)
            return
        for group, parameters in zip(self.param_groups, moved, strict=True):
            for same_dtype in _by_dtype(parameters):
                self._update(same_dtype, group)

    def _update(self, parameters: list[Any], group: dict[str, Any]) -> None:
        """One step of parameters of one dtype, with the settings of their group."""
        states = [self.state[p] for p in parameters]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        if self.found_inf is not None:  # in a list: the host would read a single tensor, and wait for the device
            torch._foreach_sub_(steps, [self.found_inf] * len(steps))
        torch._fused_adamw_(
            parameters,
            [p.grad for p in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            steps,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
        )


def _by_dtype(parameters: list[Tensor]) -> list[list[Tensor]]:
    """The fused kernel on CUDA takes tensors of one dtype only; torch's own step groups them too."""
    dtypes = {p.dtype for p in parameters}
    return [parameters] if len(dtypes) == 1 else [[p for p in parameters if p.dtype == dtype] for dtype in dtypes]


_first_step = inspect.unwrap(torch.optim.AdamW.step)


class SGD(torch.optim.SGD):
    """torch's own, without the import of its compiler in `step` (see `_without_compiler`)."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))


_KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (AdamW, {}),
    "sgd": (SGD, {"momentum": 0.9, "nesterov": True}),
}


def _without_compiler() -> None:
    """Keep optimizers from importing torch's compiler, which they do only to exempt their methods from compilation.

    The import takes a second of CPU and 80 MB at the start of each worker; if it was imported already, nothing changes.
    """
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        method = inspect.unwrap(getattr(torch.optim.Optimizer, name))
        if "torch._dynamo" not in sys.modules and not hasattr(method, _DISABLED):
            setattr(method, _DISABLED, method)


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    factors: Mapping[str, float] = MappingProxyType({}),
    moved: Sequence[Tensor] | None = None,
) -> torch.optim.Optimizer:
    """AdamW or SGD with Nesterov momentum 0.9; weight decay on matrices and kernels only, not on biases and norms.

    Args:
        factors: name of a parameter → what its rate is multiplied by, where that is not 1.
        moved: what this process moves in place of each parameter that learns, in their order; None: these themselves.

    Raises:
        RequestError: torch's optimizer does not accept optimizer.args.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    trained = [p for p in model.parameters() if p.requires_grad] if moved is None else moved
    groups = _groups(dict(zip(names, trained, strict=True)), config.weight_decay, factors)
    kind, offered = _KINDS[config.name]
    offered = offered | {"fused": kind is not SGD or not any(map(_has_no_fused_sgd, trained))}
    _without_compiler()
    if taken := sorted(config.args.keys() & {"lr", "params", "weight_decay"}):
        raise RequestError(f"optimizer.args.{taken[0]} can't be set here", remedy="--lr or --weight-decay")
    optimizer: torch.optim.Optimizer = factories.call_factory(
        kind, {"params": groups, "lr": 0.0, **offered}, config.args, where="optimizer"
    )
    if optimizer.defaults.get("momentum"):
        for parameter in trained:  # the first step would create them, from uninitialised memory if it is skipped
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    optimizer.register_load_state_dict_post_hook(_as_built_here)
    return optimizer


def _has_no_fused_sgd(parameter: Tensor) -> bool:
    """Whether torch's fused SGD would silently leave the parameter unchanged: 16 bits on CPU (torch 2.13)."""
    return parameter.device.type == "cpu" and parameter.dtype in (torch.bfloat16, torch.float16)


def _as_built_here(optimizer: torch.optim.Optimizer) -> None:
    """Adapt a loaded state to this device: a checkpoint may come from another one.

    Fused kernels on CPU traverse weights and state in memory order and ignore strides.
    """
    for group in optimizer.param_groups:
        group["fused"] = optimizer.defaults["fused"]
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter).copy_(value)


def _groups(trained: Mapping[str, Tensor], weight_decay: float, factors: Mapping[str, float]) -> list[dict[str, Any]]:
    """Parameter groups by share of the rate, the full rate first, and matrices before the others.

    Checkpoints hold the optimizer's state in this order.
    """
    groups: dict[tuple[float, bool], list[Tensor]] = {(1.0, True): [], (1.0, False): []}
    for name, parameter in trained.items():
        groups.setdefault((factors.get(name, 1.0), parameter.ndim >= 2), []).append(parameter)
    return [
        {"params": members, "weight_decay": weight_decay if matrices else 0.0}
        | ({"rate_factor": factor} if factor != 1 else {})
        for (factor, matrices), members in groups.items()
        if members
    ]


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group the schedule's rate, or its share of it."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("rate_factor", 1.0)


def base_rate(optimizer: torch.optim.Optimizer) -> float:
    """The rate that `set_rate` was given; the first group's rate in a user's own optimizer."""
    group = optimizer.param_groups[0]
    return float(group["lr"]) / float(group.get("rate_factor", 1.0))


class EMAModel(AveragedModel):
    """An exponential moving average of weights and buffers; the decay itself warms up as (1+n)/(10+n).

    Without that, a short run would be averaged with its random start (Adam's bias, seen in weights). What modules hold
    beside tensors has no average: the newest is adopted. The state is torch's own; unlike torch's, the update does not
    wait for the device.

    Args:
        shared: parameters that never change: the average has the same ones, and no copy of them.
    """

    def __init__(self, model: nn.Module, decay: float, shared: Iterable[Tensor] = ()) -> None:
        super().__init__(nn.Module(), use_buffers=True)
        self.module = deepcopy(model, {id(parameter): parameter for parameter in shared})
        self.requires_grad_(False)
        self._decay = decay
        default = nn.Module.get_extra_state
        self._with_extra_state = [n for n, part in model.named_modules() if type(part).get_extra_state is not default]

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        count = int(self.n_averaged)  # on the CPU, also where the model is on a GPU
        decay = min(self._decay, (1 + count) / (10 + count)) if count else 0.0
        pairs = zip(_tensors(self.module), _tensors(model), strict=False)  # as torch does
        for shadows, values in _by_format((shadow, value) for shadow, value in pairs if shadow is not value):
            if decay and shadows[0].is_floating_point():
                torch._foreach_lerp_(shadows, values, 1 - decay)
            else:
                torch._foreach_copy_(shadows, values)
        self.n_averaged += 1
        for name in self._with_extra_state:
            extra_state = model.get_submodule(name).get_extra_state()
            self.module.get_submodule(name).set_extra_state(deepcopy(extra_state))


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers; of sharded ones the rows of this process."""
    tensors = chain(model.parameters(), model.buffers())
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors)


def _by_format(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterable[tuple[list[Tensor], list[Tensor]]]:
    """Both grouped by dtype, as one kernel takes them."""
    groups: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for shadow, value in pairs:
        group = groups.setdefault(shadow.dtype, ([], []))
        group[0].append(shadow)
        group[1].append(value)
    return groups.values()
