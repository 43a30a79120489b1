from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from multigpu_cli.distributed.launch_env import PreviousAttempt, read_previous_attempt, record_end
from multigpu_cli.distributed.world import World
from multigpu_cli.faults.rank_exits import RankExit, RankExits, read_previous_cause
from tests.support.world import CPU

END = RankExit(0, "forward, 3 steps done", "ValueError: bad", "stack", False, samples=[])
COUNTED = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "2"}


def worlds(size: int, attempt: int = 0, store: dist.TCPStore | None = None) -> list[World]:
    store = store or dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    prefixed = dist.PrefixStore(f"attempt-{attempt}", store)
    return [World(CPU, rank, size, rank, size, prefixed, attempt=attempt) for rank in range(size)]


def test_the_first_come_is_the_first_told() -> None:
    first, second, third = map(RankExits, worlds(3))
    assert not first.has_exits()
    second.publish(replace(END, rank=1))
    first.publish(END)
    assert third.has_exits()
    assert [end.rank for end in third.wait_for_exits()] == [1, 0]
    assert third.wait_for_exits()[0] == replace(END, rank=1)


def test_waiting_ends_when_all_have_spoken_or_patience_does() -> None:
    first, second = map(RankExits, worlds(2))
    first.publish(END)
    assert len(first.wait_for_exits(patience=0.1)) == 1
    second.publish(replace(END, rank=1))
    assert len(first.wait_for_exits(patience=60)) == 2, "at once"


def test_alone_everything_stays_here() -> None:
    alone = RankExits(World(CPU))
    alone.publish(END)
    alone.flag_hang()
    assert alone.wait_for_exits(patience=60) == [END]
    assert not alone.has_exits()


def test_a_hang_calls_everyone() -> None:
    first, second = map(RankExits, worlds(2))
    assert not second.is_hang()
    first.flag_hang()
    assert second.is_hang()


def test_a_stack_that_is_too_long_keeps_its_end() -> None:
    first, second = map(RankExits, worlds(2))
    first.publish(replace(END, stack="x" * 30_000 + "the point"))
    assert second.wait_for_exits()[0].stack.endswith("the point")
    assert len(second.wait_for_exits()[0].stack) == 20_000


def test_the_next_attempt_learns_the_cause_through_the_agents_folder(tmp_path: Path) -> None:
    record_end(tmp_path, 1, PreviousAttempt("rank 1 failed", 7, 100.0))
    told = read_previous_attempt({"TORCHELASTIC_ERROR_FILE": f"{tmp_path}/attempt_2/0/error.json"} | COUNTED)
    assert told == PreviousAttempt("rank 1 failed", 7, 100.0)
    assert read_previous_cause(World(CPU, attempt=2, previous_attempt=told)) == "rank 1 failed"
    assert read_previous_cause(World(CPU, attempt=2)) == "all workers ended without an error message"
    assert read_previous_cause(World(CPU)) is None


def test_a_store_that_has_gone_calls_nobody() -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("localhost", store.port, is_master=False)
    ends = RankExits(World(CPU, 0, 2, store=dist.PrefixStore("attempt-0", client)))
    del store
    assert not ends.is_hang()
    ends.publish(END)
    ends.flag_hang()
    assert ends.wait_for_exits(patience=60) == [END], "at once, and one's own error is not lost over it"
