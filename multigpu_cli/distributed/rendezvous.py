"""The handshake of all ranks over the launcher's store: which ranks take part, and which attempt this is.

The agents keep one store over all restarts and each counts its own restarts, so neither the store nor the count tells
which entries belong to this attempt. Rank 0 publishes a new generation with the nonce of every rank that it has read;
each rank whose own nonce is in it acknowledges; when all have, it is sealed. Earlier attempts have others.
"""

import json
import time
import zlib
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn
from uuid import uuid4

import torch.distributed as dist

from multigpu_cli.distributed.launch_env import FinalVerdict, PreviousAttempt
from multigpu_cli.distributed.world import RankGpu, Roster
from multigpu_cli.errors import TrainingError

_GO = "multigpu/go"
_PAUSE = 0.02  # seconds between two polls


@dataclass(frozen=True)
class RankInfo:
    """A rank's description of itself, its machine (host) and its agent (node)."""

    rank: int
    size: int
    nonce: str  # unique to this process
    host: str
    node: str
    attempt: int = 0  # the number of this attempt, from the agent's records
    restarts_left: int = 0  # how often the agent would still restart its workers
    verdict: FinalVerdict | None = None  # the final verdict of an earlier attempt under that agent, if any
    previous_attempt: PreviousAttempt | None = None  # how the previous attempt under that agent ended, if known
    gpu: RankGpu | None = None  # the rank's GPU; None on CPU
    pid: int = 0  # of its process

    def as_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: bytes) -> "RankInfo":
        found: dict[str, Any] = json.loads(text)
        found["verdict"] = FinalVerdict.of(*found["verdict"]) if found["verdict"] else None
        found["previous_attempt"] = PreviousAttempt(*found["previous_attempt"]) if found["previous_attempt"] else None
        found["gpu"] = RankGpu(*found["gpu"]) if found["gpu"] else None
        return cls(**found)


def merge_rank_infos(infos: Sequence[RankInfo], generation: str) -> Roster:
    """The roster that follows from the infos of all ranks, in rank order."""
    nodes = tuple(info.node for info in infos)
    number = max(info.attempt for info in infos)
    verdicts = [info.verdict for info in infos if info.verdict and info.verdict.applies_to(nodes)]
    ends = [info.previous_attempt for info in infos if info.previous_attempt and info.attempt == number]
    return Roster(
        store_prefix=generation,
        attempt=number,
        hosts=tuple(info.host for info in infos),
        agent_ids=nodes,
        restarts_left=min(info.restarts_left for info in infos),
        verdict=next(iter(verdicts), None),
        previous_attempt=min(ends, key=lambda end: -end.last_progress_time, default=None),
        gpus=tuple(info.gpu for info in infos),
        pids=tuple(info.pid for info in infos),
    )


def agree_on_roster(store: dist.Store, own: RankInfo, *, patience: float) -> Roster:
    """Run the handshake with all other ranks over their store, which may still have entries of earlier attempts.

    After so many seconds a TrainingError names those that did not arrive.
    """
    until = time.monotonic() + patience
    return _lead(store, own, until) if own.rank == 0 else _follow(store, own, until)


def _lead(store: dist.Store, own: RankInfo, until: float) -> Roster:
    seen: list[bytes] = []
    now = merge_rank_infos([own], uuid4().hex)
    while own.size > 1:
        texts = [_read_key(store, f"multigpu/hello-{rank}") for rank in range(1, own.size)]
        infos = [RankInfo.from_text(text) for text in texts if text]
        if len(infos) < own.size - 1 or any(info.size != own.size for info in infos):
            seen = []  # an earlier attempt had another size
        elif texts != seen:
            seen, now = [text for text in texts if text], merge_rank_infos([own, *infos], uuid4().hex)
            for info in infos:  # a key of its own for each: all of them poll
                store.set(f"{_GO}-{info.rank}", json.dumps([info.nonce, now.store_prefix]))
        elif store.check([f"{now.store_prefix}/here-{rank}" for rank in range(1, own.size)]):
            break
        if time.monotonic() > until:
            _give_up(store, own, now.store_prefix)
        time.sleep(_PAUSE)
    whole = json.dumps([own.as_text(), *(text.decode() for text in seen)])
    store.set(f"{now.store_prefix}/sealed", b64encode(zlib.compress(whole.encode())).decode())  # each rank reads it
    return now


def _follow(store: dist.Store, own: RankInfo, until: float) -> Roster:
    store.set(f"multigpu/hello-{own.rank}", own.as_text())
    generation = ""
    while not (generation and store.check([f"{generation}/sealed"])):
        nonce, newest = json.loads(_read_key(store, f"{_GO}-{own.rank}") or b'["", ""]')
        if nonce == own.nonce and newest != generation:
            generation = newest
            store.set(f"{generation}/here-{own.rank}", "")
        if time.monotonic() > until:
            _give_up(store, own, generation)
        time.sleep(_PAUSE)
    whole = zlib.decompress(b64decode(store.get(f"{generation}/sealed")))
    infos = [RankInfo.from_text(text.encode()) for text in json.loads(whole)]
    return merge_rank_infos(infos, generation)


def _read_key(store: dist.Store, key: str) -> bytes | None:
    return bytes(store.get(key)) if store.check([key]) else None


def _give_up(store: dist.Store, own: RankInfo, generation: str) -> NoReturn:
    """Raise the error that names the missing ranks, as far as this rank knows."""
    ranks = range(1, own.size)
    silent = [rank for rank in ranks if not store.check([f"multigpu/hello-{rank}"])]
    missing = silent or [rank for rank in ranks if not store.check([f"{generation}/here-{rank}"])]
    who = f"rank {', '.join(map(str, missing[:8]))}{' …' if missing[8:] else ''}" if own.rank == 0 else "rank 0"
    raise TrainingError(
        f"{who} of {own.size} did not join: its node may have failed at the start",
        remedy="use multigpu doctor under the same torchrun to test the connections; torchrun --max-restarts=… tries "
        "again",
        caused_by_peer=True,
    )
