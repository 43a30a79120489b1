"""The handshake of all ranks over the launcher's store: who is there, and which attempt this is.

The agents keep one store over all restarts, and each counts its own, so neither the store nor the count says which
words are of now. Rank 0 publishes a fresh generation with the nonce of every rank that it heard; each rank whose own
nonce is in it acknowledges; when all have, it is sealed. Whatever an earlier attempt left is of another generation.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, NoReturn
from uuid import uuid4

import torch.distributed as dist

from multigpu_cli.errors import TrainingError
from multigpu_cli.runtime.restart_records import FinalVerdict, PreviousAttempt

_GO = "multigpu/go"
_PAUSE = 0.02  # seconds between two looks


class RankGpu(NamedTuple):
    """The GPU that a rank works on: what no other GPU is called, and what is alike."""

    uuid: str
    model: str


@dataclass(frozen=True)
class RankInfo:
    """What a rank says of itself and its node.

    Attributes:
        nonce: nobody said this before.
        host, node: where it runs, and under which agent.
        attempt: the number of this attempt, as far as that agent knows.
        restarts_left: that the agent would still make.
        verdict: how an earlier attempt there ended for good.
        previous_attempt: how the one before this one ended there.
        gpu: that it works on; None on CPU.
    """

    rank: int
    size: int
    nonce: str
    host: str
    node: str
    attempt: int = 0
    restarts_left: int = 0
    verdict: FinalVerdict | None = None
    previous_attempt: PreviousAttempt | None = None
    gpu: RankGpu | None = None

    def as_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: bytes) -> "RankInfo":
        found: dict[str, Any] = json.loads(text)
        found["verdict"] = FinalVerdict.of(*found["verdict"]) if found["verdict"] else None
        found["previous_attempt"] = PreviousAttempt(*found["previous_attempt"]) if found["previous_attempt"] else None
        found["gpu"] = RankGpu(*found["gpu"]) if found["gpu"] else None
        return cls(**found)


@dataclass(frozen=True)
class Roster:
    """What all ranks know once they have met.

    Attributes:
        store_prefix: the part of the store that is theirs.
        attempt: how often the job was started before, as the node with the longest memory knows.
        hosts, agent_ids: of each rank.
        restarts_left: of the agent that has the fewest.
        verdict: why there is nothing to do, or None.
        previous_attempt: how the attempt before this one ended, or None.
        gpus: of each rank.
    """

    store_prefix: str
    attempt: int
    hosts: tuple[str, ...]
    agent_ids: tuple[str, ...]
    restarts_left: int
    verdict: FinalVerdict | None
    previous_attempt: PreviousAttempt | None
    gpus: tuple[RankGpu | None, ...]


def merge_rank_infos(hellos: Sequence[RankInfo], generation: str) -> Roster:
    """What follows from what all ranks said, in rank order."""
    nodes = tuple(hello.node for hello in hellos)
    number = max(hello.attempt for hello in hellos)
    verdicts = [hello.verdict for hello in hellos if hello.verdict and hello.verdict.applies_to(nodes)]
    ends = [hello.previous_attempt for hello in hellos if hello.previous_attempt and hello.attempt == number]
    return Roster(
        store_prefix=generation,
        attempt=number,
        hosts=tuple(hello.host for hello in hellos),
        agent_ids=nodes,
        restarts_left=min(hello.restarts_left for hello in hellos),
        verdict=next(iter(verdicts), None),
        previous_attempt=min(ends, key=lambda end: -end.last_progress_time, default=None),
        gpus=tuple(hello.gpu for hello in hellos),
    )


def agree_on_roster(store: dist.Store, own: RankInfo, *, patience: float) -> Roster:
    """Meet all other ranks.

    Args:
        store: that all of them reach; what earlier attempts said may still be in it.
        patience: seconds until ranks that have not arrived are given up.

    Raises:
        TrainingError: some rank did not arrive; says which.
    """
    until = time.monotonic() + patience
    return _lead(store, own, until) if own.rank == 0 else _follow(store, own, until)


def _lead(store: dist.Store, own: RankInfo, until: float) -> Roster:
    seen: list[bytes] = []
    now = merge_rank_infos([own], uuid4().hex)
    while own.size > 1:
        said = [_read_key(store, f"multigpu/hello-{rank}") for rank in range(1, own.size)]
        hellos = [RankInfo.from_text(text) for text in said if text]
        if len(hellos) < own.size - 1 or any(hello.size != own.size for hello in hellos):
            seen = []  # an earlier attempt had another size
        elif said != seen:
            seen, now = [text for text in said if text], merge_rank_infos([own, *hellos], uuid4().hex)
            store.set(_GO, json.dumps({hello.rank: hello.nonce for hello in hellos} | {"generation": now.store_prefix}))
        elif store.check([f"{now.store_prefix}/here-{rank}" for rank in range(1, own.size)]):
            break
        if time.monotonic() > until:
            _give_up(store, own, now.store_prefix)
        time.sleep(_PAUSE)
    store.set(f"{now.store_prefix}/sealed", json.dumps([own.as_text(), *(text.decode() for text in seen)]))
    return now


def _follow(store: dist.Store, own: RankInfo, until: float) -> Roster:
    store.set(f"multigpu/hello-{own.rank}", own.as_text())
    generation = ""
    while not (generation and store.check([f"{generation}/sealed"])):
        go = json.loads(_read_key(store, _GO) or b"{}")
        if go.get(str(own.rank)) == own.nonce and go["generation"] != generation:
            generation = go["generation"]
            store.set(f"{generation}/here-{own.rank}", "")
        if time.monotonic() > until:
            _give_up(store, own, generation)
        time.sleep(_PAUSE)
    hellos = [RankInfo.from_text(text.encode()) for text in json.loads(store.get(f"{generation}/sealed"))]
    return merge_rank_infos(hellos, generation)


def _read_key(store: dist.Store, key: str) -> bytes | None:
    return bytes(store.get(key)) if store.check([key]) else None


def _give_up(store: dist.Store, own: RankInfo, generation: str) -> NoReturn:
    """Name who is missing, as far as this rank can tell."""
    ranks = range(1, own.size)
    silent = [rank for rank in ranks if not store.check([f"multigpu/hello-{rank}"])]
    missing = silent or [rank for rank in ranks if not store.check([f"{generation}/here-{rank}"])]
    who = f"rank {', '.join(map(str, missing[:8]))}{' …' if missing[8:] else ''}" if own.rank == 0 else "rank 0"
    error = TrainingError(
        f"{who} of {own.size} did not arrive: its node may have gone while it started",
        remedy="multigpu doctor under the same torchrun says who reaches whom; torchrun --max-restarts=… tries again",
    )
    error.caused_by_peer = True
    raise error
