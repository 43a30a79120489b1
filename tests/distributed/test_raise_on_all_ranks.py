from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from multigpu_cli.distributed.world import World, all_reduce_max, run_in_step, run_on_all_ranks, run_on_main_rank
from multigpu_cli.errors import RequestError, TrainingError
from tests.support.ranks import run_on_each_rank
from tests.support.world import ALONE


def failing(*guilty: int, kind: type[TrainingError] = RequestError) -> Callable[[World], list[Any]]:
    """Work that fails on some ranks, and what each rank then hears."""

    def work(world: World) -> list[Any]:
        def half() -> str:
            if world.rank in guilty:
                raise kind(f"rank {world.rank} can't", remedy=f"help {world.rank}")
            return "done"

        try:
            outcome: list[Any] = [run_on_all_ranks(world, half)]
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
        error.caused_by_peer = True
        raise error

    def work(world: World) -> bool:
        with pytest.raises(TrainingError) as raised:
            run_on_main_rank(world, lost)
        return raised.value.caused_by_peer

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


def test_one_rank_works_for_all_without_a_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object, **named: object) -> None:
        raise AssertionError("an all-reduce for what one broadcast says")

    def exhaust() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def work(world: World) -> list[Any]:
        told: list[Any] = [run_on_main_rank(world, lambda: {"rank": world.rank, "rows": [1, 2]}, by=1)]
        for wrong in (lambda: _raise(RequestError("rank 1 may not", remedy="ask")), exhaust):
            with pytest.raises(TrainingError) as raised:
                run_on_main_rank(world, wrong, by=1)
            told.append([type(raised.value).__name__, *raised.value.args, raised.value.shared])
        return told

    monkeypatch.setattr(dist, "all_reduce", refuse)
    assert (
        run_on_each_rank(3, work)
        == [
            [
                {"rank": 1, "rows": [1, 2]},
                ["RequestError", "rank 1 may not", "ask", True],
                ["OutOfMemory", "rank 1 ran out of memory: CUDA out of memory", "use a smaller --batch-size", True],
            ]
        ]
        * 3
    )


def _raise(error: Exception) -> None:
    raise error


def test_where_all_communicate_a_rank_without_memory_ends_alone() -> None:
    """The others are in the middle of what it no longer takes part in: they can't vote."""

    def exhaust() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory\nand details")

    def break_down() -> None:
        raise RuntimeError("shapes differ")

    world = World(torch.device("cpu"), rank=1, size=2)
    assert run_in_step(world, lambda: 3) == 3
    with pytest.raises(TrainingError, match=r"^rank 1 ran out of memory: CUDA out of memory"):
        run_in_step(world, exhaust)
    with pytest.raises(RuntimeError, match="shapes differ"):
        run_in_step(world, break_down)
