"""Compares the replicas of all ranks by checksums before each checkpoint, so that none is written if they differ."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from multigpu_cli.distributed.world import World, all_gather
from multigpu_cli.errors import TrainingError

_WORD = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def check_replicas(
    model: nn.Module,
    world: World,
    step: int,
    optimizer: Optimizer | None = None,
    *,
    num_shards: int = 1,
    find_parameter: Callable[[Tensor], Tensor] = lambda moved: moved,
) -> None:
    """Compare all ranks by one checksum per tensor; costs one pass over the state, and one small collective.

    The optimizer's state per parameter affects the weights only later. `num_shards` and `find_parameter` are as in
    `Strategy`: each shard of weights and of the optimizer's state is compared. TrainingError, the same on every rank:
    names the ranks and the tensors that differ.
    """
    if world.size == 1:
        return
    state, names = model.state_dict(), {name for name, _ in model.named_buffers()}
    state = dict(model.named_parameters()) | state  # which leaves out what an adapter learns beside
    buffers = {name: _checksum([state[name]], world) for name in state if name in names}
    sums = dict(buffers)
    if num_shards < world.size:
        sums |= {name: _checksum([value], world) for name, value in state.items() if name not in names}
        sums |= _checksum_optimizer(optimizer, model, world, find_parameter) if optimizer else {}
    if not sums:
        return
    own = torch.stack(list(sums.values()))
    if num_shards == 1 and _are_equal(own):
        return
    everyone = torch.stack(all_gather(world, own)).cpu()
    if num_shards > 1:
        _compare_sums(everyone[:, : len(buffers)], list(buffers), range(world.size), step)
    for shard in range(num_shards):
        _compare_sums(everyone, list(sums), range(shard, world.size, num_shards), step)


def _are_equal(sums: Tensor) -> bool:
    """Whether all ranks have the same: by their maximum and minimum, so that no rank holds the sums of all."""
    both = torch.stack([sums, ~sums])
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    return torch.equal(both[0], ~both[1])


def _compare_sums(everyone: Tensor, tensors: Sequence[str], ranks: range, step: int) -> None:
    """Compare the sums [all ranks, tensors] of some ranks."""
    compared = everyone[list(ranks)]
    rows = [tuple(row) for row in compared.tolist()]
    usual, _ = Counter(rows).most_common(1)[0]
    odd = [rank for rank, row in zip(ranks, rows, strict=True) if row != usual]
    if not odd:
        return
    names = [name for name, column in zip(tensors, compared.T, strict=True) if len(column.unique()) > 1]
    who = f"rank {', '.join(map(str, odd))}" + ("" if len(ranks) > 2 else f" or {ranks[rows.index(usual)]}")
    raise TrainingError(
        f"the replicas differ at step {step}: {who} differs in {', '.join(names[:3])}"
        + (f" and {len(names) - 3} more" if len(names) > 3 else ""),
        remedy="model, optimizer and hooks must not change their state by the rank, or by random numbers of their own; "
        "the last checkpoint is older than the difference",
    )


def _checksum_optimizer(
    optimizer: Optimizer, model: nn.Module, world: World, find_parameter: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """One checksum per parameter, also where it has no state: all ranks have the same number."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sums: dict[str, Tensor] = {}
    for number, parameter in enumerate(parameters):
        name = f"the optimizer's state of {names.get(find_parameter(parameter), number)}"
        sums[name] = _checksum(optimizer.state.get(parameter, {}).values(), world)
    return sums


def _checksum(values: Iterable[object], world: World) -> Tensor:
    """() int64 on the rank's device: the sum of all tensors' bits, read as integers."""
    total = torch.zeros((), dtype=torch.int64, device=world.device)
    for value in values:
        if isinstance(value, Tensor) and value.numel():
            rows = value.to_local() if hasattr(value, "to_local") else value
            flat = rows.detach().contiguous().flatten()
            total += flat.view(_WORD.get(flat.element_size(), torch.uint8)).sum(dtype=torch.int64).to(world.device)
    return total
