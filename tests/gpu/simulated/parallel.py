"""What moves tensors between simulated GPUs: NCCL's name for the process group, and DataParallel's copies."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def put_in_place(device: Any) -> None:
    """Let torch find both."""
    c10d: Any = dist.distributed_c10d
    group = device.ProcessGroupNCCL
    group.Options = device.NcclOptions
    c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = group  # type: ignore[misc]
    c10d._NCCL_AVAILABLE = True
    group._group_start = group._group_end = lambda self: None
    dist.ProcessGroup.abort = lambda self: self.shutdown()  # type: ignore[method-assign]
    c10d.default_pg_nccl_timeout = dist.constants.default_pg_nccl_timeout = timedelta(minutes=10)
    for name, function in {"_broadcast": _broadcast, "_scatter": _scatter, "_gather": _gather}.items():
        setattr(torch._C, name, function)
    torch._C._broadcast_coalesced = _broadcast_coalesced


def _broadcast(tensor: Tensor, devices: Sequence[int]) -> list[Tensor]:
    return [tensor.to(torch.device("cuda", number)) for number in devices]


def _broadcast_coalesced(tensors: Sequence[Tensor], devices: Sequence[int], buffer_size: int) -> list[list[Tensor]]:
    return [[tensor.to(torch.device("cuda", number)) for tensor in tensors] for number in devices]


def _scatter(
    tensor: Tensor, devices: Sequence[int], sizes: Sequence[int] | None, dim: int, streams: object = None
) -> list[Tensor]:
    parts = tensor.split(list(sizes), dim) if sizes else tensor.chunk(len(devices), dim)
    return [part.to(torch.device("cuda", number)) for part, number in zip(parts, devices, strict=False)]


def _gather(tensors: Sequence[Tensor], dim: int, destination: int | None) -> Tensor:
    home = "cpu" if destination == -1 else "cuda" if destination is None else f"cuda:{destination}"
    return torch.cat([tensor.to(home) for tensor in tensors], dim)
