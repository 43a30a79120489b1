"""torch's fused AdamW and its SGD, with less time of the CPU in each step and at the start."""

import inspect
import sys
from typing import Any

import torch
from torch import Tensor

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
    """torch's own, without the import of its compiler in `step` (see `avoid_compiler`)."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))


def avoid_compiler() -> None:
    """Keep optimizers from importing torch's compiler, which they do only to exempt their methods from compilation.

    The import takes a second of CPU and 80 MB at the start of each worker; if it was imported already, nothing changes.
    """
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        method = inspect.unwrap(getattr(torch.optim.Optimizer, name))
        if "torch._dynamo" not in sys.modules and not hasattr(method, _DISABLED):
            setattr(method, _DISABLED, method)
