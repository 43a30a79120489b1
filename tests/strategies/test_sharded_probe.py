"""A worker that runs out of memory while its sharded model is tried leaves no trace, and no other worker waiting."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed.fsdp  # seconds, once rather than in each forked rank
from torch import nn
from torch.nn.functional import cross_entropy

from multigpu_cli.distributed.world import World
from multigpu_cli.errors import OutOfMemory
from multigpu_cli.models.blocks import find_blocks_to_wrap
from multigpu_cli.optimizers.eval_weights import EMAModel
from multigpu_cli.planning.batch import BatchPlan
from multigpu_cli.strategies.fsdp.fsdp import FSDP2
from multigpu_cli.strategies.fsdp.probe import _RepeatedRows
from tests.strategies.one_step import reduce_step, samples
from tests.support.ranks import run_on_each_rank

PLAN = BatchPlan(samples=24, micro_batch=4, global_batch=24, workers=3)


def refuse(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory (played)")


def blocks() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.Sequential(*layers), nn.Linear(5, 3)).double()


def probe_and_step(world: World, place: str, *, keeps_weights: bool, accumulates: bool) -> tuple[Any, ...]:
    """What the probes raised, and this rank's rows of the gradient of a step after them."""
    torch.manual_seed(7)
    model = blocks()
    average = EMAModel(model, 0.9)
    strategy = FSDP2(model, world, average.module, blocks=find_blocks_to_wrap(model), keeps_weights=keeps_weights)

    def work() -> None:
        for _ in range(2):
            with strategy.accumulate(last=False):
                (cross_entropy(strategy.callable(samples(2)[0]), samples(2)[1]) * 1e9).backward()
        with torch.no_grad():
            average.module(samples(2)[0])

    raised, block = [], model.get_submodule("0.1")
    hang: dict[str, Callable[..., Any]] = {
        "forward": block.register_forward_hook,
        "backward": block.register_full_backward_pre_hook,
    }
    for _ in range(2):
        hook = hang[place](refuse) if place and world.rank == 1 else None
        try:
            strategy.probe_memory(work, accumulates=accumulates)
        except OutOfMemory as error:
            raised.append(error.problem)
        if hook:
            hook.remove()
    reduce_step(strategy, PLAN, world.rank)
    strategy.gather_state({})  # which compares what the workers have run
    return raised, [row.grad.flatten().tolist() for row in strategy.local_parameters if row.grad is not None]


def test_in_place_of_the_others_rows_a_worker_has_its_own() -> None:
    rows, group = torch.tensor([3.0, 4.0]), cast(Any, SimpleNamespace(size=lambda: 3, rank=lambda: 1))
    whole = torch.tensor([0.0, 0.0, 3.0, 4.0, 0.0, 0.0])
    _RepeatedRows(SimpleNamespace(allocate=None))(whole, rows, group)
    assert whole.tolist() == [3.0, 4.0] * 3


def test_it_is_raised_on_all_ranks_and_the_next_step_is_right() -> None:
    ways = [
        {"keeps_weights": keeps, "accumulates": adds} for keeps, adds in ((False, False), (False, True), (True, True))
    ]
    cases = [(place, way) for way in ways for place in ("", "forward", "backward")]
    message = "rank 1 ran out of memory: CUDA out of memory (played)"
    for found in run_on_each_rank(3, lambda world: [probe_and_step(world, place, **way) for place, way in cases]):
        for (place, _), (raised, gradients) in zip(cases, found, strict=True):
            assert raised == ([message] * 2 if place else [])
            assert gradients == found[0][1]
