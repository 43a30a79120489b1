"""What is tried before a sharded model is trained: this torch, the parameters, the optimizer, and passes.

In passes in which nothing is sent one worker alone may run out of memory. FSDP lets its collectives be replaced: in
place of them each worker repeats its own rows for those of the others. This takes the same memory at the same time, and
numbers like those of the weights, of which nothing is kept.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from itertools import product
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from multigpu_cli.checkpoint.pieces import iterate_tensors
from multigpu_cli.config.schema import Config
from multigpu_cli.errors import RequestError


def find_torch_errors(config: Config) -> Iterator[RequestError]:
    """What the `fully_shard` of this torch can't do."""
    known = torch.distributed.fsdp.FSDPModule
    if not hasattr(known, "set_force_sum_reduction_for_comms"):
        problem = f"--multi-gpu fsdp: fully_shard of torch {torch.__version__} can't sum gradients"
        yield RequestError(problem, remedy="a newer torch, or --multi-gpu ddp")
    if config.communication.find_unused_parameters and not hasattr(known, "set_reduce_scatter_unused_params"):
        problem = f"--find-unused-parameters can't be used with --multi-gpu fsdp: torch {torch.__version__} can't do it"
        yield RequestError(problem, remedy="--freeze what takes no part in the loss, torch 2.13, or --multi-gpu ddp")
    if config.batch.size == "auto" and not hasattr(known, "reset_iter_state"):
        yield RequestError(
            f"--batch-size auto can't be used with --multi-gpu fsdp: torch {torch.__version__} can't continue "
            "after a pass that ran out of memory",
            remedy="a number, such as --batch-size 8, or torch 2.13",
        )
    if config.reproducibility.exact and not hasattr(known, "set_custom_reduce_scatter"):
        problem = f"--exact: fully_shard of torch {torch.__version__} can't sum gradients in a fixed order"
        yield RequestError(problem, remedy="a newer torch, or --multi-gpu ddp")


def can_probe() -> bool:
    """Whether this torch can go on after a pass that failed; 2.13 can."""
    return hasattr(FSDPModule, "reset_iter_state")


def list_groups(roots: Iterable[nn.Module]) -> list[Any]:
    """What FSDP gathers as one, each."""
    modules = [module for root in roots for module in root.modules() if isinstance(module, FSDPModule)]
    groups = [module._get_fsdp_state()._fsdp_param_group for module in modules]
    return [group for group in groups if group]


@contextmanager
def without_collectives(roots: Sequence[nn.Module]) -> Iterator[None]:
    """Passes within it stay on this worker; one may fail in the middle, and none has a result. Needs `can_probe`."""
    groups = list_groups(roots)
    real = [(group._all_gather_comm, group._reduce_scatter_comm) for group in groups]
    for group, (gather, scatter) in zip(groups, real, strict=True):
        group._all_gather_comm, group._reduce_scatter_comm = _RepeatedRows(gather), _OwnPart(scatter)
        group.all_reduce_grads = False  # between groups of workers
    try:
        yield
    finally:
        for root in roots:
            if root._get_fsdp_state()._is_root:  # type: ignore[operator]  # None before its first pass
                root.reset_iter_state()  # type: ignore[operator]
        for group, comms in zip(groups, real, strict=True):
            group._all_gather_comm, group._reduce_scatter_comm = comms
            group.all_reduce_grads = True
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = parameter.sharded_param.grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None


class _RepeatedRows:
    """In place of an all-gather."""

    def __init__(self, real: Any) -> None:
        self.allocate = real.allocate

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        for rank, part in enumerate(output_tensor.chunk(group.size())):
            if rank != group.rank():  # there it lies already
                part.copy_(input_tensor)


class _OwnPart:
    """In place of a reduce-scatter."""

    def __init__(self, real: Any) -> None:
        self.allocate = real.allocate

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Leave the gradient as it is: the trial's is thrown away."""


def check_can_be_sharded(model: nn.Module) -> None:
    """Raises RequestError for the first parameter that `fully_shard` does not take."""
    parameters = dict(model.named_parameters())
    if scalar := next((name for name, parameter in parameters.items() if not parameter.ndim), None):
        problem = f"--multi-gpu fsdp: {scalar} is a parameter without dimensions, which can't be divided into rows"
        raise RequestError(problem, remedy="make it one of shape (1,), or use --multi-gpu ddp")
    learning = {parameter.dtype for parameter in parameters.values() if parameter.requires_grad}
    if len(learning) > 1:
        problem = f"--multi-gpu fsdp: the parameters have several formats: {', '.join(sorted(map(str, learning)))}"
        raise RequestError(problem, remedy="one format for all that learn, or --multi-gpu ddp")


_SIZES = ((6, 4), (256, 32))  # halves of the second have 4,096 elements, from which on 8-bit Adam stores blocks
_STEPS = 3


def check_is_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Try the optimizer on a small and a large weight, whole and in two halves, with the settings of each group.

    RequestError: the results differ, as those of Muon, LAMB and Adafactor do, which need whole weights; or a state has
    another shape than its weight, so that no checkpoint could divide it into the rows of each rank.
    """
    groups = [group for group in optimizer.param_groups if group["params"]]
    for group, size in product(groups, _SIZES):  # rows and columns
        name, like = type(optimizer).__name__, group["params"][0]
        shape = size if any(parameter.ndim > 1 for parameter in group["params"]) else (prod(size),)
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randn(shape, generator=generator).to(like.device, like.dtype) for _ in range(1 + _STEPS)]
        whole, state = _optimize(optimizer, group, drawn)
        halves = [_optimize(optimizer, group, list(half))[0] for half in zip(*(d.chunk(2) for d in drawn), strict=True)]
        reasons = [
            f"its state {key} has shape {tuple(each.shape)} for a weight of shape {shape}"
            for key, value in state.items()
            for each in iterate_tensors(value)
            if each.ndim and each.shape != whole.shape
        ]
        if not torch.allclose(torch.cat(halves), whole, rtol=1e-3, atol=1e-5):
            reasons = ["its step is not element-wise"]
        if reasons:
            raise RequestError(
                f"--multi-gpu fsdp: each worker has some rows of a weight, and {name} needs all of them: {reasons[0]}",
                remedy="use an element-wise optimizer, such as AdamW or SGD, or --multi-gpu ddp",
            )


def _optimize(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], drawn: list[Tensor]
) -> tuple[Tensor, dict[str, Any]]:
    """Return a weight and its state after some steps of a copy of the optimizer; `drawn` has weight and gradients."""
    weight = torch.nn.Parameter(drawn[0].clone())
    trial = copy(optimizer)
    vars(trial).update(vars(optimizer) | vars(trial))  # torch copies no attributes of a user's own
    trial.state = defaultdict(dict)
    if initial := _resize_state(optimizer.state.get(group["params"][0], {}), group["params"][0], weight):
        trial.state[weight] = initial
    trial.param_groups = [group | {"params": [weight], "lr": 0.01}]
    for gradient in drawn[1:]:
        weight.grad = gradient.clone()
        type(optimizer).step(trial)  # not `trial.step`, which a scheduler may have replaced by one for the original
    return weight.detach(), dict(trial.state[weight])


def _resize_state(state: dict[str, Any], parameter: Tensor, weight: Tensor) -> dict[str, Any]:
    """What an optimizer has put into the state of a parameter already, as Adagrad's constructor does, for the weight.

    Tensors of the parameter's shape are filled with their first number. {} if there are others, as Adafactor has after
    its first step: the optimizer makes them anew.
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


def find_direct_use(work: Callable[[], object], names: Mapping[DTensor, str]) -> str:
    """The name of the sharded parameter on which a pass that fails does so; "" if it fails on something else."""
    watch = _Watch(names)
    with watch, suppress(RuntimeError):
        work()
    return watch.found


class _Watch(TorchFunctionMode):
    def __init__(self, names: Mapping[DTensor, str]) -> None:
        self._names, self.found = names, ""  # the first that failed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError:
            given = [*args, *(kwargs or {}).values()]
            found = (self._names[each] for each in given if isinstance(each, DTensor) and each in self._names)
            self.found = self.found or next(found, "")
            raise
