import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytest
import torch
from torch.distributed.distributed_c10d import _set_pg_timeout

from multigpu_cli.errors import RequestError, TrainingError
from multigpu_cli.runtime.collectives import (
    all_gather,
    all_gather_object,
    all_reduce_max,
    all_reduce_sum,
    broadcast_object,
    disable_collective_timeout,
    run_on_all_ranks,
    run_on_main_rank,
)
from multigpu_cli.runtime.world import World
from tests.support.ranks import run_on_each_rank

ALONE = World(torch.device("cpu"))


def verbs(world: World) -> dict[str, Any]:
    """What every verb gives on this rank."""
    value = torch.tensor([world.rank + 1.0, 10.0])
    summed = all_reduce_sum(world, value)
    return {
        "total": summed.tolist(),
        "in place": summed is value,
        "greatest": all_reduce_max(world, [world.rank, -world.rank, 0.5]),
        "gathered": [part.tolist() for part in all_gather(world, torch.tensor([world.rank, 7]))],
        "collected": [
            str(part) for part in all_gather_object(world, {"rows": torch.arange(world.rank), "who": world.rank})
        ],
        "from_main": {name: str(value) for name, value in _told(world).items()},
        "from_last": broadcast_object(world, ["from", world.rank], source=world.size - 1),
        "decided": run_on_main_rank(world, lambda: world.rank),
        "together": run_on_all_ranks(world, lambda: world.rank * 2),
    }


def _told(world: World) -> dict[str, Any]:
    told = broadcast_object(world, {"who": world.rank, "tensor": torch.tensor([world.rank]), "none": None})
    return dict(told)


def test_a_world_of_one_talks_to_itself() -> None:
    assert verbs(ALONE) == {
        "total": [1.0, 10.0],
        "in place": True,
        "greatest": [0, 0, 0.5],
        "gathered": [[0, 7]],
        "collected": ["{'rows': tensor([], dtype=torch.int64), 'who': 0}"],
        "from_main": {"who": "0", "tensor": "tensor([0])", "none": "None"},
        "from_last": ["from", 0],
        "decided": 0,
        "together": 0,
    }


def test_three_ranks_hear_the_same() -> None:
    for rank, heard in enumerate(run_on_each_rank(3, verbs)):
        assert heard["total"] == [6.0, 30.0]
        assert heard["in place"]
        assert heard["greatest"] == [2, 0, 0.5]
        assert heard["gathered"] == [[0, 7], [1, 7], [2, 7]]
        assert [part[-2:] for part in heard["collected"]] == ["0}", "1}", "2}"], "of unlike sizes"
        assert heard["from_main"] == {"who": "0", "tensor": "tensor([0])", "none": "None"}
        assert heard["from_last"] == ["from", 2]
        assert heard["decided"] == 0
        assert heard["together"] == 2 * rank


def failing(*guilty: int, kind: type[TrainingError] = RequestError) -> Callable[[World], list[Any]]:
    """Work that fails on some ranks, and what each rank then hears."""

    def work(world: World) -> list[Any]:
        def half() -> str:
            if world.rank in guilty:
                raise kind(f"rank {world.rank} can't", remedy=f"help {world.rank}")
            return "done"

        try:
            outcome = [run_on_all_ranks(world, half)]
        except TrainingError as error:
            outcome = [type(error).__name__, error.problem, error.remedy, error.exit_code]
        return [outcome, all_reduce_max(world, [1.0])]  # everybody is still in step

    return work


@pytest.mark.parametrize("size", [1, 3])
def test_nobody_fails(size: int) -> None:
    assert run_on_each_rank(size, failing()) == [[["done"], [1.0]]] * size


@pytest.mark.parametrize(("guilty", "first"), [((0,), 0), ((1,), 1), ((2,), 2), ((1, 2), 1), ((0, 1, 2), 0)])
def test_one_error_becomes_everybodys(guilty: tuple[int, ...], first: int) -> None:
    heard = run_on_each_rank(3, failing(*guilty))
    for error, after in heard:
        assert error == ["RequestError", f"rank {first} can't", f"help {first}", 2]
        assert after == [1.0]


def test_a_failed_training_stays_one() -> None:
    for error, _ in run_on_each_rank(2, failing(1, kind=TrainingError)):
        assert error == ["TrainingError", "rank 1 can't", "help 1", 1]


def test_whose_fault_it_is_not_stays_so() -> None:
    def lost() -> None:
        error = TrainingError("cut off")
        error.consequence = True
        raise error

    def work(world: World) -> bool:
        with pytest.raises(TrainingError) as raised:
            run_on_main_rank(world, lost)
        return raised.value.consequence

    assert run_on_each_rank(2, work) == [True, True]


def test_alone_the_error_itself_is_raised() -> None:
    with pytest.raises(RequestError, match="mine"):
        run_on_all_ranks(ALONE, lambda: _raise(RequestError("mine")))


def test_what_rank_0_may_not_do_nobody_may() -> None:
    def work(world: World) -> str:
        try:
            run_on_main_rank(world, lambda: _raise(RequestError("rank 0 may not")))
        except RequestError as error:
            return error.problem
        return "?"

    assert run_on_each_rank(2, work) == ["rank 0 may not"] * 2


def test_who_waits_has_no_clock_of_its_own() -> None:
    """A collective can't know whether the rank it waits for moves."""

    def work(world: World) -> list[float]:
        _set_pg_timeout(timedelta(seconds=0.5))
        disable_collective_timeout(world)
        time.sleep(1.5 * world.rank)
        return all_reduce_max(world, [world.rank])

    assert run_on_each_rank(2, work) == [[1.0], [1.0]]


def test_no_code_travels_with_a_value() -> None:
    def work(world: World) -> str:
        try:
            broadcast_object(world, Path("anything but plain values"))
        except UnpicklingError:
            return "refused"
        return "taken" if world.rank else "sent"

    assert run_on_each_rank(2, work) == ["sent", "refused"]


def _raise(error: Exception) -> None:
    raise error
