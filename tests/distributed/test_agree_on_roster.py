"""All ranks of all nodes agree which attempt they are in, whatever earlier ones left in the store."""

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import ClassVar
from uuid import uuid4

import pytest
import torch.distributed as dist

from multigpu_cli.distributed.launch_env import FinalVerdict, PreviousAttempt
from multigpu_cli.distributed.rendezvous import RankInfo, agree_on_roster, merge_rank_infos
from multigpu_cli.distributed.world import RankGpu, Roster
from multigpu_cli.errors import TrainingError

FIRST = RankInfo(rank=0, size=3, nonce="a", host="node1", node="node1 7 run", restarts_left=3)
SECOND = replace(FIRST, rank=1, nonce="b")
THIRD = replace(FIRST, rank=2, nonce="c", host="node2", node="node2 9 run")
STOP, WRONG = FinalVerdict(75, "stopped", ("node1 7 run", "node2 9 run")), FinalVerdict(2, "wrong")


def meet(store: dist.Store, hellos: list[RankInfo], late: Callable[[], None] = lambda: None) -> list[Roster]:
    """What each rank is told; `late` happens once all but the last have spoken."""
    with ThreadPoolExecutor(len(hellos)) as ranks:
        early = [ranks.submit(agree_on_roster, store, hello, patience=10) for hello in hellos[:-1]]
        time.sleep(0.1)
        late()
        last = ranks.submit(agree_on_roster, store, hellos[-1], patience=10)
        return [answer.result() for answer in [*early, last]]


def test_all_ranks_are_told_the_same() -> None:
    told = meet(dist.HashStore(), [FIRST, SECOND, THIRD])
    assert told[0] == told[1] == told[2]
    assert told[0].hosts == ("node1", "node1", "node2")
    assert (told[0].attempt, told[0].restarts_left, told[0].verdict) == (0, 3, None)


def test_all_ranks_are_told_whose_gpu_is_which() -> None:
    gpus = [RankGpu("uuid-0", "H100"), RankGpu("uuid-1", "L4"), None]
    hellos = [replace(hello, gpu=gpu) for hello, gpu in zip((FIRST, SECOND, THIRD), gpus, strict=True)]
    assert {told.gpus for told in meet(dist.HashStore(), hellos)} == {tuple(gpus)}


def test_a_rank_alone_meets_itself() -> None:
    assert agree_on_roster(dist.HashStore(), replace(FIRST, size=1), patience=1).hosts == ("node1",)


@pytest.mark.parametrize("order", [[FIRST, SECOND, THIRD], [THIRD, SECOND, FIRST], [SECOND, FIRST, THIRD]])
def test_words_of_an_earlier_attempt_confuse_nobody(order: list[RankInfo]) -> None:
    """Of the same size and of another; the ranks of now come in any order, also after the old words were believed."""
    store = dist.HashStore()
    before = meet(store, [replace(hello, nonce=f"old {hello.nonce}", node="gone") for hello in (FIRST, SECOND, THIRD)])
    now = meet(store, order)
    assert {each.store_prefix for each in now}.isdisjoint({before[0].store_prefix})
    assert len({each.store_prefix for each in now}) == 1
    assert now[0].agent_ids == ("node1 7 run", "node1 7 run", "node2 9 run")
    smaller = meet(store, [replace(FIRST, size=2, nonce="d"), replace(SECOND, size=2, nonce="e")])
    assert len(smaller[0].hosts) == 2


def test_a_word_that_was_believed_too_soon_is_taken_back() -> None:
    """Rank 0 hears an old word of rank 2 and publishes; the new one comes later."""
    store = dist.HashStore()
    store.set("multigpu/hello-2", replace(THIRD, nonce="old", host="gone").as_text())
    gone: list[str] = []
    told = meet(store, [FIRST, SECOND, THIRD], late=lambda: gone.append(json.loads(store.get("multigpu/go-2"))[0]))
    assert gone == ["old"]
    assert {each.hosts for each in told} == {("node1", "node1", "node2")}


def test_the_longest_memory_counts_the_attempts() -> None:
    """A node that joins has seen none; a membership change does not raise the agents' own counts."""
    ends = [PreviousAttempt("rank 2 lost", 12, 100.0), PreviousAttempt("rank 2 lost", 12, 101.0), None]
    hellos = [
        replace(h, attempt=n, previous_attempt=e)
        for h, n, e in zip((FIRST, SECOND, THIRD), (4, 4, 0), ends, strict=True)
    ]
    found = merge_rank_infos(hellos, "g")
    assert (found.attempt, found.previous_attempt) == (4, PreviousAttempt("rank 2 lost", 12, 101.0))
    assert merge_rank_infos([replace(FIRST, restarts_left=1), SECOND, THIRD], "g").restarts_left == 1
    forgotten = [replace(FIRST, attempt=2), replace(SECOND, attempt=2), replace(THIRD, previous_attempt=ends[0])]
    assert merge_rank_infos(forgotten, "g").previous_attempt is None, (
        "what a newcomer's agent lived through before is of another attempt"
    )


def test_a_verdict_of_one_node_is_everybodys() -> None:
    told = meet(dist.HashStore(), [FIRST, SECOND, replace(THIRD, verdict=WRONG)])
    assert {each.verdict for each in told} == {WRONG}


@pytest.mark.parametrize("others", [[], [replace(THIRD, node="node3 5 run")]])
def test_a_verdict_binds_only_the_nodes_that_came_to_it(others: list[RankInfo]) -> None:
    """Who left was stopped, and the others go on; who joined had the others stopped."""
    same, here = merge_rank_infos([replace(FIRST, verdict=STOP), THIRD], "g"), [replace(FIRST, verdict=STOP), *others]
    assert same.verdict == STOP
    assert merge_rank_infos(here, "g").verdict is None


def test_who_does_not_arrive_is_named() -> None:
    store, refused = dist.HashStore(), threading.Event()

    def lonely(hello: RankInfo) -> None:
        with pytest.raises(TrainingError, match="rank 2 of 3" if hello.rank == 0 else "rank 0 of 3") as error:
            agree_on_roster(store, hello, patience=0.3)
        assert error.value.caused_by_peer, "the same again may go well"
        refused.set()

    with ThreadPoolExecutor(1) as other:
        other.submit(lonely, SECOND)
        lonely(FIRST)
    assert refused.is_set()


def test_what_ranks_poll_does_not_grow_with_their_number() -> None:
    class Counting(dist.HashStore):
        sizes: ClassVar[list[int]] = []

        def get(self, key: str) -> bytes:
            content = bytes(super().get(key))
            if "go" in key:
                self.sizes.append(len(content))
            return content

    size = 24
    hellos = [replace(FIRST, rank=rank, size=size, nonce=uuid4().hex) for rank in range(size)]
    assert len({roster.store_prefix for roster in meet(Counting(), hellos)}) == 1
    assert 0 < max(Counting.sizes) < 100
