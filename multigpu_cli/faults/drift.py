"""Replicas that are no longer alike: compared by a checksum before each checkpoint, so that none is written of them."""

from collections import Counter

import torch
from torch import Tensor, nn

from multigpu_cli.errors import TrainingError
from multigpu_cli.runtime.collectives import gathered
from multigpu_cli.runtime.world import World

_WORD = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def check_replicas(model: nn.Module, world: World, step: int) -> None:
    """Compare weights and buffers over all ranks by one number each; costs one pass over them and one small collective.

    Raises:
        TrainingError: they differ; names the ranks and the first parameters. The same on every rank.
    """
    if world.size == 1:
        return
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor) and value.numel()}
    everyone = torch.stack(gathered(world, torch.stack([_checksum(value) for value in state.values()]))).cpu()
    rows = [tuple(row.tolist()) for row in everyone]
    usual, _ = Counter(rows).most_common(1)[0]
    odd = [rank for rank, row in enumerate(rows) if row != usual]
    if not odd:
        return
    names = [name for name, column in zip(state, everyone.T, strict=True) if len(column.unique()) > 1]
    ranks = f"rank {', '.join(map(str, odd))}" + ("" if world.size > 2 else f" or {rows.index(usual)}")
    raise TrainingError(
        f"the replicas have drifted apart by step {step}: {ranks} differs in {', '.join(names[:3])}"
        + (f" and {len(names) - 3} more" if len(names) > 3 else ""),
        remedy="the model must not use the rank, or random numbers of its own, to change its weights; "
        "the last checkpoint is from before",
    )


def _checksum(value: Tensor) -> Tensor:
    """() int64: the sum of the bits, read as integers."""
    flat = value.detach().contiguous().flatten()
    return flat.view(_WORD.get(flat.element_size(), torch.uint8)).sum(dtype=torch.int64)
