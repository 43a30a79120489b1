"""Compares the replicas of all ranks by checksums before each checkpoint, so that none is written if they differ."""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from multigpu_cli.errors import TrainingError
from multigpu_cli.runtime.collectives import all_gather
from multigpu_cli.runtime.world import World

_WORD = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def check_replicas(
    model: nn.Module, world: World, step: int, optimizer: Optimizer | None = None, *, sharded: bool = False
) -> None:
    """Compare all ranks by one checksum per tensor; costs one pass over the state, and one small collective.

    Args:
        model: its weights and buffers are compared.
        optimizer: its state per parameter, which affects the weights only later.
        sharded: each rank has other rows of weights and optimizer state, so that buffers alone are compared.

    Raises:
        TrainingError: they differ; names the ranks and the first tensors. Every rank raises the same.
    """
    compared = dict(model.named_buffers()) if sharded else model.state_dict()
    if world.size == 1 or not compared:
        return
    sums = {name: _checksum([value], world) for name, value in compared.items()}
    if optimizer and not sharded:
        sums |= _checksum_optimizer(optimizer, model, world)
    everyone = torch.stack(all_gather(world, torch.stack(list(sums.values())))).cpu()
    rows = [tuple(row.tolist()) for row in everyone]
    usual, _ = Counter(rows).most_common(1)[0]
    odd = [rank for rank, row in enumerate(rows) if row != usual]
    if not odd:
        return
    names = [name for name, column in zip(sums, everyone.T, strict=True) if len(column.unique()) > 1]
    ranks = f"rank {', '.join(map(str, odd))}" + ("" if world.size > 2 else f" or {rows.index(usual)}")
    raise TrainingError(
        f"the replicas differ at step {step}: {ranks} differs in {', '.join(names[:3])}"
        + (f" and {len(names) - 3} more" if len(names) > 3 else ""),
        remedy="model and optimizer must not change their state by the rank, or by random numbers of their own; "
        "the last checkpoint is older than the difference",
    )


def _checksum_optimizer(optimizer: Optimizer, model: nn.Module, world: World) -> dict[str, Tensor]:
    """One checksum per parameter, also where it has no state: all ranks have the same number."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {
        f"the optimizer's state of {names.get(parameter, number)}": _checksum(
            optimizer.state.get(parameter, {}).values(), world
        )
        for number, parameter in enumerate(parameters)
    }


def _checksum(values: Iterable[object], world: World) -> Tensor:
    """() int64 on the rank's device: the sum of all tensors' bits, read as integers."""
    total = torch.zeros((), dtype=torch.int64, device=world.device)
    for value in values:
        if isinstance(value, Tensor) and value.numel():
            flat = value.detach().contiguous().flatten()
            total += flat.view(_WORD.get(flat.element_size(), torch.uint8)).sum(dtype=torch.int64).to(world.device)
    return total
