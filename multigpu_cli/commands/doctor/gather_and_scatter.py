"""The two halves of an all-reduce, which sharded training uses one by one: all-gather and reduce-scatter."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13
_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(whole: Tensor) -> None:
    """Put each worker's part of a tensor (n), n / workers elements, into all workers' tensors."""
    _gather(whole, _own_part(whole).clone())


def reduce_scatter(whole: Tensor) -> None:
    """Sum a tensor (n) over the workers; each has its own part of the sum, n / workers elements, in its place."""
    part = _own_part(whole)
    total = part.clone()
    _scatter(total, whole)
    part.copy_(total)


def _own_part(whole: Tensor) -> Tensor:
    return whole.chunk(dist.get_world_size())[dist.get_rank()]
