import time
from datetime import timedelta
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch.distributed.distributed_c10d import _set_pg_timeout

from multigpu_cli.distributed.world import (
    World,
    all_gather,
    all_gather_object,
    all_reduce_max,
    all_reduce_sum,
    broadcast_object,
    disable_collective_timeout,
    run_on_all_ranks,
    run_on_main_rank,
)
from tests.support.ranks import run_on_each_rank
from tests.support.world import ALONE


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
        "from_main": {name: str(value) for name, value in _broadcast_facts(world).items()},
        "from_last": broadcast_object(world, ["from", world.rank], source=world.size - 1),
        "decided": run_on_main_rank(world, lambda: world.rank),
        "together": run_on_all_ranks(world, lambda: world.rank * 2),
    }


def _broadcast_facts(world: World) -> dict[str, Any]:
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
