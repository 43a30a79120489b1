"""Which rows of a state a rank has, without the other ranks: six of them, in two groups of three."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed.fsdp  # seconds, once rather than in each forked rank
from torch import Tensor

from multigpu_cli.distributed.world import World
from multigpu_cli.errors import TrainingError
from multigpu_cli.runtime.module_state import map_tensors
from multigpu_cli.strategies.fsdp import state as sharded_state
from multigpu_cli.strategies.fsdp.state import GatheringSaver, RowSaver, ShardedState, agree_on_owner
from tests.support.ranks import run_on_each_rank
from tests.support.world import CPU

WEIGHT = torch.arange(14.0).reshape(7, 2)
ROWS = ((0, 3), (3, 6), (6, 7))
NAMES = ["model.w", "average.module.w", "optimizer.state.0.exp_avg"]


def build(rank: int) -> ShardedState:
    place = divmod(rank, 3)
    mesh: Any = SimpleNamespace(ndim=2, size=lambda dim: (2, 3)[dim], get_local_rank=lambda dim: place[dim])
    state = ShardedState(World(CPU, rank, 6), {"w": cast(Any, WEIGHT)}, mesh)
    state.moved = {0: cast(Any, WEIGHT)}
    return state


def fill(rows: Tensor) -> dict[str, Any]:
    """A state in which all that is divided has these numbers."""
    return {
        "model": {"w": rows, "seen": torch.ones(7)},
        "average": {"module.w": rows, "n_averaged": torch.tensor(2)},
        "optimizer": {"state": {0: {"step": torch.tensor(5.0), "exp_avg": rows}}, "param_groups": [{"lr": 0.1}]},
        "task": {"w": torch.ones(7, 2)},
    }


def plain(state: Any) -> Any:
    return map_tensors(state, lambda _, value: (value.device.type, tuple(value.shape), value.tolist()))


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that would become a DTensor are told from plain ones by their sign."""
    monkeypatch.setattr(sharded_state, "_as_dtensor", lambda rows, like: -rows if like is WEIGHT else None)


def as_rank(rank: int) -> dict[str, Any]:
    rows = WEIGHT[slice(*ROWS[rank % 3])]
    expected = fill(-rows)
    expected["optimizer"]["state"][0]["exp_avg"] = rows
    return expected


@pytest.mark.parametrize("rank", range(6))
def test_the_first_group_writes_its_rows_and_each_rank_reads_its_own(rank: int, divided: None) -> None:
    sharded, (begin, end) = build(rank), ROWS[rank % 3]
    outline, own = sharded.split(fill(WEIGHT[begin:end]))
    meta = fill(torch.empty(7, 2, device="meta"))
    assert str(outline) == str(meta)
    assert {name: (rows.tolist(), first) for name, (rows, first) in own.items()} == (
        {name: (WEIGHT[begin:end].tolist(), begin) for name in NAMES} if rank < 3 else {}
    )
    assert sharded.replicas == 2

    asked: list[Any] = []

    def read(name: str, value: Tensor, begin: int = 0, end: int | None = None, /) -> Tensor:
        asked.append((name, begin, end))
        return WEIGHT[begin:end]

    assert plain(sharded.read(outline, read)) == plain(as_rank(rank))
    assert asked == [(name, begin, end) for name in NAMES]


def test_tensors_of_another_model_are_read_and_received_whole(divided: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever loads them says what is wrong."""
    sharded, other = build(1), {"model": {"v": torch.ones(2, 2), "w": torch.ones(9, 2)}}
    outline = {"model": {name: value.to("meta") for name, value in other["model"].items()}}
    found = sharded.read(outline, lambda name, value, *rows: torch.ones(value.shape) if not rows else value)
    assert plain(found) == plain(other)
    monkeypatch.setattr(sharded_state, "broadcast_outline", lambda world, state, source: state)
    monkeypatch.setattr(sharded_state, "broadcast_tensor", lambda world, outline, *_: outline)
    assert plain(sharded.scatter(other, 0)) == plain(other)
    assert plain(sharded.scatter(fill(WEIGHT), 0)) == plain(as_rank(1))


@pytest.mark.parametrize("shape", [(6,), (4, 2), (3, 1)])
def test_states_of_another_shape_than_their_rows_are_refused(shape: tuple[int, ...]) -> None:
    """They would be saved as rows of the weight, which no resume could put together."""
    sharded, state = build(1), fill(WEIGHT[3:6])
    state["optimizer"]["state"][0]["absmax1"] = torch.ones(shape)
    message = re.escape(f"optimizer.state.0.absmax1 has shape {shape}, and this rank's rows of its weight have (3, 2)")
    with pytest.raises(TrainingError, match=message):
        sharded.split(state)
    with pytest.raises(TrainingError, match=message):
        sharded.gather({"optimizer": {"state": {0: {"absmax1": torch.ones(shape)}}}})


def test_ranks_agree_on_the_owner_of_a_folder_that_all_see(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".lock").write_text(name)

    def work(world: World) -> list[str]:
        own = ("one", "other")[world.rank]
        return [agree_on_owner(world, tmp_path / "one"), agree_on_owner(world, tmp_path / own)]

    assert run_on_each_rank(2, work) == [["one", ""]] * 2


def test_best_rows_go_with_checkpoints_until_rank_0_has_written_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank copies its own, and none is gathered; rank 0 empties its dict once best.pt is on disk."""
    rows, saved, pending = torch.ones(2, 2), list[tuple[int, list[str]]](), dict[str, Any]()
    outline = {"model": {"w": torch.empty(4, 2, device="meta"), "seen": torch.ones(3)}}
    strategy: Any = SimpleNamespace(sharded_state_dict=lambda held: (outline, {"model.w": (rows, 2)}))
    snapshot: Any = SimpleNamespace(state={"model": {}, sharded_state._ROWS: {}}, finish=None)
    monkeypatch.setattr(RowSaver, "_capture", lambda *_: snapshot)
    monkeypatch.setattr(sharded_state, "replace", lambda snapshot, **parts: parts["peers"])
    monkeypatch.setattr(sharded_state, "all_reduce_max", lambda world, values: [float(bool(pending))])
    nothing: Any = None
    writer: Any = SimpleNamespace(submit=lambda finish, job: saved.append((1, [*job.__self__.best])))
    savers = [RowSaver(strategy, World(CPU, rank, 2), nothing, writer, "owner") for rank in (0, 1)]
    pending, other = [saver.capture_best({}) for saver in savers]
    assert (list(pending), pending["w"].is_meta, pending["seen"].tolist(), other) == (
        ["w", "seen"],
        True,
        [1.0] * 3,
        {},
    )
    rows.zero_()
    for expected in (["model.w"], ["model.w"], []):
        if not expected:
            pending.clear()
        peers: Any = savers[0].capture(nothing, {}, 3)
        savers[1].capture(nothing, {}, 3)
        assert [*peers.best] == saved[-1][1] == expected
        assert all(each.tensor.tolist() == [[1.0] * 2] * 2 and each.begin == 2 for each in peers.best.values())


def test_rank_0_keeps_what_was_gathered_and_the_others_wait_for_their_own_writers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[Any] = []
    monkeypatch.setattr(sharded_state, "all_reduce_max", lambda world, values: done.append("together"))
    strategy: Any = SimpleNamespace(gather_state=lambda held: done.append(held) or {"whole": held})
    nothing, writer = cast(Any, None), cast(Any, SimpleNamespace(wait=lambda: done.append("waited")))
    for world in (World(CPU, 0, 2), World(CPU, 1, 2)):
        found = GatheringSaver(strategy, world, nothing, writer).capture(nothing, {"a": world.rank}, 3)
        assert (found and found.finish()) == ({"whole": {"a": 0}} if world.is_main else None)
        RowSaver(strategy, world, nothing, writer, "owner").wait()
    assert done == [{"a": 0}, "together", {"a": 1}, "waited", "together"]
