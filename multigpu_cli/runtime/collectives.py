"""What the processes of a run say to each other; in a world of one, every verb is free."""

import io
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout  # the only way once a group is there; torchtitan's too

from multigpu_cli.runtime.world import World


def all_reduce_sum(world: World, value: Tensor) -> Tensor:
    """The sum of everybody's tensor, in place, on every rank."""
    if world.size > 1:
        dist.all_reduce(value)
    return value


def all_reduce_max(world: World, values: Sequence[float]) -> list[float]:
    """The elementwise maximum of everybody's numbers, on every rank; reading them waits for the device."""
    if world.size == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device=world.device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return [float(value) for value in tensor.tolist()]


def disable_collective_timeout(world: World) -> None:
    """Give collectives no clock of their own any more: they can't know whether the rank they wait for moves."""
    if world.size > 1:
        _set_pg_timeout(timedelta(days=7))


def all_gather(world: World, values: Tensor) -> list[Tensor]:
    """Everybody's tensor, in rank order; all must have one shape."""
    if world.size == 1:
        return [values]
    parts = torch.zeros((world.size, *values.shape), dtype=values.dtype, device=values.device)
    parts[world.rank] = values
    dist.all_reduce(parts)  # rather than all_gather, which gloo lacks for CUDA tensors
    return list(parts)


def broadcast_object(world: World, value: Any, *, source: int = 0) -> Any:
    """Rank 0's value (or another source's) on every rank: anything that `torch.load(weights_only=True)` reads back.

    It travels as a byte tensor rather than as a pickled object, so no code can come with it.
    """
    if world.size == 1:
        return value
    speaks = world.rank == source
    packed = torch.empty(0, dtype=torch.uint8)
    if speaks:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        packed = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    size = torch.tensor([packed.numel()], dtype=torch.int64, device=world.device)
    dist.broadcast(size, src=source)
    wire = packed.to(world.device) if speaks else torch.empty(int(size), dtype=torch.uint8, device=world.device)
    dist.broadcast(wire, src=source)
    if speaks:
        return value
    return torch.load(io.BytesIO(wire.cpu().numpy().tobytes()), weights_only=True, map_location="cpu")


def all_gather_object(world: World, value: Any) -> list[Any]:
    """Everybody's value, in rank order, on every rank: anything that `torch.load(weights_only=True)` reads back."""
    if world.size == 1:
        return [value]
    buffer = io.BytesIO()
    torch.save(value, buffer)
    mine = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8).to(world.device)
    sizes = [int(size) for size in all_gather(world, torch.tensor(mine.numel(), device=world.device))]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=world.device)
    padded[: mine.numel()] = mine
    parts = zip(all_gather(world, padded), sizes, strict=True)
    found = (part[:size].cpu().numpy().tobytes() for part, size in parts)
    return [torch.load(io.BytesIO(content), weights_only=True, map_location="cpu") for content in found]
