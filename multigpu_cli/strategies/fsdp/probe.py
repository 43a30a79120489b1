"""Passes of a sharded model in which nothing is sent, so that one worker alone may run out of memory in them.

FSDP lets its collectives be replaced. In place of them each worker repeats its own rows for those of the others: this
takes the same memory at the same time, and numbers like those of the weights, of which nothing is kept.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


def can_probe() -> bool:
    """Whether this torch can go on after a pass that failed; 2.13 can."""
    return hasattr(FSDPModule, "reset_iter_state")


def list_groups(roots: Iterable[nn.Module]) -> list[Any]:
    """What FSDP gathers as one, each."""
    modules = [module for root in roots for module in root.modules() if isinstance(module, FSDPModule)]
    states = [module._get_fsdp_state() for module in modules]
    if not hasattr(FSDPModule, "reset_iter_state"):  # before torch 2.13 one at most
        return [state._fsdp_param_group for state in states if state._fsdp_param_group]
    return [group for state in states for group in state._fsdp_param_groups]


@contextmanager
def send_nothing(roots: Sequence[nn.Module]) -> Iterator[None]:
    """Within it, passes of these sharded models stay on this worker; one may fail in the middle, and none has a result.

    Needs `can_probe`.
    """
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
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])
