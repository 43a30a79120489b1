from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from multigpu_cli.faults.rank_exit import RankExit, RankExits, earlier_cause
from multigpu_cli.runtime.elastic import PreviousAttempt, last_end
from multigpu_cli.runtime.world import World

END = RankExit(0, "forward, 3 steps done", "ValueError: bad", "stack", False, samples=[])
CPU = torch.device("cpu")
COUNTED = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "2"}


def worlds(size: int, attempt: int = 0, store: dist.TCPStore | None = None) -> list[World]:
    store = store or dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    prefixed = dist.PrefixStore(f"attempt-{attempt}", store)
    return [World(CPU, rank, size, rank, size, attempt, prefixed) for rank in range(size)]


def test_the_first_come_is_the_first_told() -> None:
    first, second, third = map(RankExits, worlds(3))
    assert not first.any()
    second.tell(replace(END, rank=1))
    first.tell(END)
    assert third.any()
    assert [end.rank for end in third.heard()] == [1, 0]
    assert third.heard()[0] == replace(END, rank=1)


def test_waiting_ends_when_all_have_spoken_or_patience_does() -> None:
    first, second = map(RankExits, worlds(2))
    first.tell(END)
    assert len(first.heard(patience=0.1)) == 1
    second.tell(replace(END, rank=1))
    assert len(first.heard(patience=60)) == 2, "at once"


def test_alone_everything_stays_here() -> None:
    alone = RankExits(World(CPU))
    alone.tell(END)
    alone.call_hang()
    alone.conclude("nobody listens", None, 0.0)
    assert alone.heard(patience=60) == [END]
    assert not alone.any()


def test_a_hang_calls_everyone() -> None:
    first, second = map(RankExits, worlds(2))
    assert not second.hang()
    first.call_hang()
    assert second.hang()


def test_a_stack_that_is_too_long_keeps_its_end() -> None:
    first, second = map(RankExits, worlds(2))
    first.tell(replace(END, stack="x" * 30_000 + "the point"))
    assert second.heard()[0].stack.endswith("the point")
    assert len(second.heard()[0].stack) == 20_000


def test_the_next_attempt_learns_the_cause_through_the_agents_folder(tmp_path: Path) -> None:
    RankExits(World(CPU, attempt=1, agent=tmp_path)).conclude("rank 1 failed", 7, 100.0)
    told = last_end({"TORCHELASTIC_ERROR_FILE": f"{tmp_path}/attempt_2/0/error.json"} | COUNTED)
    assert told == PreviousAttempt("rank 1 failed", 7, 100.0)
    assert earlier_cause(World(CPU, attempt=2, last=told)) == "rank 1 failed"
    assert earlier_cause(World(CPU, attempt=2)) == "all workers ended without a word"
    assert earlier_cause(World(CPU)) is None


def test_a_store_that_has_gone_calls_nobody() -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("localhost", store.port, is_master=False)
    ends = RankExits(World(CPU, 0, 2, store=dist.PrefixStore("attempt-0", client)))
    del store
    assert not ends.hang()
    ends.tell(END)
    ends.conclude("nobody reads it", None, 0.0)
    ends.call_hang()
    assert ends.heard(patience=60) == [END], "at once, and one's own error is not lost over it"
