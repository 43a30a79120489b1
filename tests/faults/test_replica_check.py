"""Replicas that differ are found, and named."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # seconds, once rather than in each forked rank
from torch import nn
from torch.optim import Optimizer

from multigpu_cli.config.schema import OptimizerConfig
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import TrainingError
from multigpu_cli.faults.replica_check import check_replicas
from multigpu_cli.optimizers.build import build_optimizer
from multigpu_cli.strategies.fsdp.fsdp import FSDP2
from tests.support.ranks import run_on_each_rank
from tests.support.run_training import run_training


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def verdict(
    world: World, change_on: int | None, model: nn.Module | None = None, optimizer: Optimizer | None = None
) -> str:
    model = model or network()
    if world.rank == change_on:
        with torch.no_grad():
            weight = model.get_parameter("2.weight")
            weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))
    try:
        check_replicas(model, world, 7, optimizer)
    except TrainingError as error:
        return error.problem
    return ""


def test_equal_replicas_pass() -> None:
    assert run_on_each_rank(3, lambda world: verdict(world, None)) == ["", "", ""]


def test_one_bit_is_enough_and_every_rank_hears_of_it() -> None:
    said = run_on_each_rank(3, lambda world: verdict(world, 1))
    assert len(set(said)) == 1
    assert "step 7" in said[0]
    assert "rank 1 differs in 2.weight" in said[0]


def test_of_two_ranks_either_may_be_wrong() -> None:
    assert all("rank 0 or 1" in text or "rank 1 or 0" in text for text in run_on_each_rank(2, lambda w: verdict(w, 0)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_number_formats(dtype: torch.dtype) -> None:
    def differs(world: World) -> bool:
        model = network().to(dtype)
        if world.rank:
            model.get_parameter("0.bias").data[1] = 3.0
        try:
            check_replicas(model, world, 1)
        except TrainingError:
            return True
        return False

    assert run_on_each_rank(2, differs) == [True, True]


def test_statistics_count_as_weights_do() -> None:
    def said(world: World) -> str:
        model = network()
        model.get_buffer("1.num_batches_tracked").add_(int(world.rank == 1))
        return verdict(world, None, model)

    assert all("rank 1 differs in 1.num_batches_tracked" in text for text in run_on_each_rank(3, said))


def test_weights_that_no_checkpoint_has_count_too() -> None:
    """Those that an adapter learns beside: with --exact each rank reads them by itself."""

    def said(world: World) -> str:
        model = network()
        model.register_state_dict_post_hook(lambda _module, state, *_: state.__delitem__("2.weight"))
        return verdict(world, 1, model)

    assert all("rank 1 differs in 2.weight" in text for text in run_on_each_rank(3, said))


def test_so_does_what_the_optimizer_keeps() -> None:
    """A bit of a second moment may take long to show in a weight; a state that only one rank has is another, too."""

    def said(world: World) -> list[str]:
        model = network()
        optimizer = build_optimizer(model, OptimizerConfig())
        found = [verdict(world, None, model, optimizer)]
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        if world.rank != 2:
            optimizer.step()
        found.append(verdict(world, None, model, optimizer))
        optimizer.step()
        if world.rank == 2:
            optimizer.step()
        found.append(verdict(world, None, model, optimizer))
        if world.rank == 1:
            square = optimizer.state[model.get_parameter("2.weight")]["exp_avg_sq"]
            square[0, 0] = torch.nextafter(square[0, 0], torch.tensor(9.0))
        found.append(verdict(world, None, model, optimizer))
        return found

    for alike, missing, again, other in run_on_each_rank(3, said):
        assert (alike, again) == ("", "")
        assert "rank 2 differs in the optimizer's state of 0.weight, the optimizer's state of 2.weight" in missing
        assert other.endswith("at step 7: rank 1 differs in the optimizer's state of 2.weight")


def spoil_sharded(world: World) -> list[str]:
    """What is said of four workers in groups of two: as they are, and with a bit of rank 3, then of others, changed."""
    model = network()
    strategy = FSDP2(model, world, shard_size=2)
    optimizer = torch.optim.SGD(strategy.local_parameters, 0.1, momentum=0.9)
    strategy.attach_optimizer(optimizer)
    for rows in strategy.local_parameters:
        rows.grad = torch.ones_like(rows)
    optimizer.step()
    weight = next(
        rows for rows in strategy.local_parameters if strategy.find_parameter(rows) is model.get_parameter("2.weight")
    )
    spoiled = {3: weight.detach(), 0: optimizer.state[weight]["momentum_buffer"]}
    found = []
    for rank, value in [(None, weight.detach()), *spoiled.items(), (2, model.get_buffer("1.num_batches_tracked"))]:
        value.add_(int(world.rank == rank))
        try:
            check_replicas(
                model, world, 7, optimizer, num_shards=strategy.num_shards, find_parameter=strategy.find_parameter
            )
            found.append("")
        except TrainingError as error:
            found.append(error.problem.partition(": ")[2])
        value.sub_(int(world.rank == rank))
    return found


def test_workers_with_the_same_rows_of_a_sharded_model_are_compared() -> None:
    """Of two with the same rows either may be wrong; buffers are alike on all."""
    expected = [
        "",
        "rank 3 or 1 differs in 2.weight",
        "rank 2 or 0 differs in the optimizer's state of 2.weight",
        "rank 2 differs in 1.num_batches_tracked",
    ]
    assert run_on_each_rank(4, spoil_sharded) == [expected] * 4


@pytest.mark.parametrize(("how", "where"), [("drift", "inner.1.weight"), ("spoil", "the optimizer's state of inner.1")])
def test_no_checkpoint_is_written_of_replicas_that_differ(tmp_path: Path, how: str, where: str) -> None:
    flags: dict[str, Any] = {"save_dir": str(tmp_path / "run"), "checkpoint_every": 2, "batch_size": 5, "epochs": 2}
    ended = run_training(2, model="tests.support.failing_model:net", sets=[f"model.args.how={how}"], **flags)
    assert "the replicas differ at step 4: rank" in ended.error
    assert f" differs in {where}" in ended.error
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000002"]
