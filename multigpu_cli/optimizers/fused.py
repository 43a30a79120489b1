"""torch's fused AdamW and its SGD, with less time of the CPU in each step and at the start; Muon beside AdamW."""

import inspect
import sys
from collections.abc import Collection, Sequence
from itertools import chain
from operator import is_
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks as _post_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks as _pre_hooks

from multigpu_cli.config.code_names import match_names
from multigpu_cli.errors import RequestError

_DISABLED = "__dynamo_disable"  # the attribute in which torch stores a method that is not compiled


class _Batch(NamedTuple):
    """Parameters of one group and dtype, which the kernel moves together, with their states."""

    group: dict[str, Any]
    parameters: list[Tensor]
    states: list[dict[str, Tensor]]


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW without the checks that its `step` repeats each time: the same kernel, less CPU time.

    The state is torch's own, so checkpoints go both ways; `found_inf` skips a step on the device, and `grad_scale`
    divides the gradients, as they do there. With hooks or under a profiler torch's own `step` is taken.
    """

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None
    _of: list[Any] = []  # noqa: RUF012  the lists and the state from which the next two were made; replaced as a whole
    _batches: list[_Batch] = []  # noqa: RUF012
    _idle: list[Tensor] = []  # noqa: RUF012  parameters without a gradient

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step over the parameters with a gradient; torch's own `step` does the first, which creates the state."""
        hooks = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks or _pre_hooks or _post_hooks
        if closure is not None or hooks or torch._C._autograd._profiler_enabled():
            _whole_step(self, closure)
            return
        of: list[Any] = [group["params"] for group in self.param_groups] + [self.state]
        gradients: list[list[Any]] = [[parameter.grad for parameter in each.parameters] for each in self._batches]
        idle = [parameter.grad for parameter in self._idle]
        same = all(map(is_, of, self._of)) and {*map(type, idle)} <= _NONE
        if not (gradients and same) or NoneType in map(type, chain.from_iterable(gradients)):
            self._of, self._batches = of, self._divide()
            gradients = [[parameter.grad for parameter in batch.parameters] for batch in self._batches]
        if not gradients:
            _whole_step(self, None)
            return
        grad_mode = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            steps = [[state["step"] for state in batch.states] for batch in self._batches]
            every = list(chain.from_iterable(steps))
            torch._foreach_add_(every, 1)
            if self.found_inf is not None:  # in a list: the host would read a single tensor, and wait for the device
                torch._foreach_sub_(every, [self.found_inf] * len(every))
            for batch, batch_gradients, counts in zip(self._batches, gradients, steps, strict=True):
                self._step_batch(batch, batch_gradients, counts)
        finally:
            torch._C._set_grad_enabled(grad_mode)

    def _step_batch(self, batch: _Batch, gradients: list[Tensor], steps: list[Tensor]) -> None:
        """Step the parameters of one batch with one kernel; `steps` are their step counts, already increased."""
        group = batch.group
        torch._fused_adamw_(
            batch.parameters,
            gradients,
            [state["exp_avg"] for state in batch.states],
            [state["exp_avg_sq"] for state in batch.states],
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

    def _divide(self) -> list[_Batch]:
        """Return the batches; [] if torch's own step is needed: a state is missing, or settings need another kernel."""
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        moved = {parameter for parameter in every if parameter.grad is not None}
        self._idle = [parameter for parameter in every if parameter not in moved]
        special = any(group[name] for group in self.param_groups for name in ("amsgrad", "maximize", "differentiable"))
        special |= not all(group["fused"] for group in self.param_groups)
        if special or any(parameter not in self.state for parameter in moved):
            return []
        batches = []
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter in moved]
            for dtype in {parameter.dtype: None for parameter in parameters}:  # the kernel on CUDA takes one
                same = [parameter for parameter in parameters if parameter.dtype == dtype]
                batches.append(_Batch(group, same, [self.state[parameter] for parameter in same]))
        return batches


_NONE = {NoneType}
_whole_step = torch.optim.Optimizer.profile_hook_step(torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step)))
AdamW.step.hooked = True  # type: ignore[attr-defined]  # or torch wraps it in its profiler's, which takes 20 calls


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


class Muon(torch.optim.Optimizer):
    """torch's Muon for the groups that are `hidden`, and AdamW (betas, eps) for the others; both work on one state.

    Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks". By default its steps are as large as
    those of AdamW, so that both take the same rate and weight decay: Liu et al. 2025, "Muon is Scalable for LLM
    Training" (`adjust_lr_fn="match_rms_adamw"`). RequestError: this torch has no Muon.
    """

    def __init__(
        self,
        params: Sequence[dict[str, Any]],
        lr: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Sequence[float] = (3.4445, -4.7750, 2.0315),
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise RequestError(
                f"--optimizer muon: torch {torch.__version__} has no Muon", remedy="torch 2.9 or later, or adamw"
            )
        self._parts: dict[bool, torch.optim.Optimizer] = {
            True: torch.optim.Muon(
                [nn.Parameter(torch.zeros(1, 1))],
                momentum=momentum,
                nesterov=nesterov,
                ns_coefficients=tuple(ns_coefficients),  # type: ignore[arg-type]  # torch itself says how many
                ns_steps=ns_steps,
                adjust_lr_fn=adjust_lr_fn,
            ),
            False: AdamW([nn.Parameter(torch.zeros(1))], betas=tuple(betas), eps=eps, fused=True),  # type: ignore[arg-type]
        }
        groups = [{**self._parts[bool(group["hidden"])].defaults, "lr": lr, **group} for group in params]
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of each part over its groups; a loaded state has replaced groups and state since the last one."""
        for hidden, part in self._parts.items():
            part.param_groups = [group for group in self.param_groups if group["hidden"] == hidden]
            part.state = self.state
            part.step()


def find_hidden_matrices(model: nn.Module, spared: Collection[str] = ()) -> set[str]:
    """The names of the matrices that Muon moves: of two dimensions, not spared, and not of an embedding or the head.

    The head is the model's last linear layer, unless that is within one of several blocks of a class: then the output
    has the weights of an embedding. RequestError: a pattern matches nothing, or no matrix is left.
    """
    matrices = {name: p for name, p in model.named_parameters() if p.requires_grad and p.ndim == 2}
    outside = [layer.weight for layer in model.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)]
    if (head := _find_head(model)) is not None:
        outside.append(head.weight)
    left_out = {id(weight) for weight in outside}
    hidden = {name for name, parameter in matrices.items() if id(parameter) not in left_out}
    for pattern in spared:
        hidden -= set(match_names(list(matrices), pattern, f"optimizer.args.adamw {pattern!r}", "matrix that learns"))
    if not hidden:
        problem = "--optimizer muon: there is no hidden matrix to train, only embeddings, the head, kernels or vectors"
        raise RequestError(problem, remedy="--optimizer adamw")
    return hidden


def _find_head(model: nn.Module) -> nn.Linear | None:
    linear = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    if not linear:
        return None
    path = linear[-1][0].split(".")
    for depth in range(1, len(path)):
        parent, block = (model.get_submodule(".".join(path[:end])) for end in (depth - 1, depth))
        if sum(type(sibling) is type(block) for sibling in parent.children()) > 1:
            return None
    return linear[-1][1]
