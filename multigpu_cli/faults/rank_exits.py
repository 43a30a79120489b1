"""Where a rank is in its run, and what ranks publish in the launcher's store: progress, a hang, how each ended."""

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread
from typing import TextIO, TypeVar

import torch.distributed as dist
from torch import Tensor

from multigpu_cli.config.regular_files import without_links
from multigpu_cli.distributed.world import World, call_in_thread
from multigpu_cli.errors import FAILED

PHASES = (
    "starting",
    "agreeing",
    "logging",
    "saving",
    "evaluating",
    "fetching data",
    "forward",
    "backward",
    "last backward",
    "reduction",
    "optimizer",
)
"""In the order of a step, from the end of the step before: a rank in a later phase waits for those in earlier ones."""


@dataclass(frozen=True)
class RankPosition:
    """The position of a rank, as it is sent to the others."""

    rank: int
    steps: int  # optimizer steps done
    phase: str  # one of PHASES
    line: str  # the innermost line of code outside of Python and installed packages
    arrivals: int = 0  # how often it came, since the last step, to where all workers wait for each other

    @property
    def order(self) -> tuple[int, int, int]:
        return self.steps, self.arrivals, PHASES.index(self.phase)

    def __str__(self) -> str:
        return f"{self.phase}, {self.steps} steps done" + (f", at {self.line}" if self.line else "")


class OwnProgress:
    """The position of this rank, updated by the training loop and read by the watchdog's thread."""

    def __init__(self) -> None:
        self.steps, self.phase, self.arrivals = 0, PHASES[0], 0
        self.samples: Tensor | None = None  # sample numbers of the present micro-batch
        self.moves, self.last_move = 0, time.time()  # how often progress was marked, and when last, in Unix seconds
        self.logs: Path | None = None  # the folder for reports, once training begins
        self.first_step: int | None = None

    def mark(self) -> None:
        self.moves += 1
        self.last_move = time.time()

    def steps_done(self) -> int | None:
        """Optimizer steps done in the run, or None before the first one of this attempt."""
        return None if self.first_step is None or self.steps == self.first_step else self.steps

    def open_report(self, name: str) -> TextIO:
        """A new file in the folder for reports; before training begins, what is written to it is lost."""
        if self.logs is None:
            return os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
        return open(self.logs / name, "w", opener=without_links)


Answer = TypeVar("Answer")

_TIMEOUT = 5.0  # seconds for an answer


class DeadlineStore:
    """A store whose calls return or raise within a few seconds.

    torch's `check` waits for as long as the connection seems open, which is up to 15 minutes without a network. So each
    call runs in a thread of its own; while one is overdue, no other is started. RuntimeError, as of torch's own stores:
    the store is gone or does not answer.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._asking: Thread | None = None

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        return self._ask(lambda: bytes(self._store.get(key)))

    def add(self, key: str, amount: int) -> int:
        return self._ask(lambda: int(self._store.add(key, amount)))

    def delete(self, key: str) -> None:
        self._ask(lambda: self._store.delete_key(key))

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(lambda: bool(self._store.check(list(keys))))

    def _ask(self, question: Callable[[], Answer]) -> Answer:
        if self._asking and self._asking.is_alive():
            raise RuntimeError("the store does not answer")
        asking, answer = call_in_thread(question, "question")
        asking.join(_TIMEOUT)  # its end, not its answer: Python's exit aborts a thread that it finds in torch's code
        if asking.is_alive():
            self._asking = asking
            raise RuntimeError("the store does not answer")
        return answer.result()


_LONGEST = 20_000  # characters of a stack


@dataclass(frozen=True)
class RankExit:
    """How one rank ended."""

    rank: int
    place: str  # its position in the run, as text
    problem: str  # the exception's type and message
    stack: str  # its traceback
    caused_by_peer: bool  # it only lost its peers
    exit_code: int = FAILED  # of its process
    samples: Sequence[int] = ()  # sample numbers of the micro-batch that it worked on


class RankExits:
    """Publishes how this rank ended, and reads how the others did; in a world of one it keeps its own."""

    def __init__(self, world: World) -> None:
        self._world, self.store = world, DeadlineStore(world.store) if world.store is not None else None
        self._own: list[RankExit] = []
        self._read: list[RankExit] = []

    def publish(self, end: RankExit) -> None:
        """Publish how this rank ended; the store keeps the order of publication.

        Once is enough, but a rank that has only lost its peers may find a fault of its own after that.
        """
        if self._own and (end.caused_by_peer or not self._own[-1].caused_by_peer):
            return
        self._own = [end]
        if self.store is not None:
            with suppress(RuntimeError):  # the rank or agent that held the store may be gone
                turn = self.store.add("ends", 1)
                self.store.set(f"end-{turn}", json.dumps(asdict(end) | {"stack": end.stack[-_LONGEST:]}))

    def wait_for_exits(self, *, patience: float = 0.0) -> list[RankExit]:
        """How the ranks ended, in order of publication; waits up to `patience` seconds for all of them."""
        if self.store is None:
            return self._own
        deadline = time.monotonic() + patience
        try:
            while len(exits := self._read_exits(self.store)) < self._world.size and time.monotonic() < deadline:
                time.sleep(0.05)
            return exits
        except RuntimeError:  # without the store no rank can be asked
            return self._own

    def _read_exits(self, store: DeadlineStore) -> list[RankExit]:
        """The last that each rank published."""
        for turn in range(len(self._read) + 1, store.add("ends", 0) + 1):
            self._read.append(RankExit(**json.loads(store.get(f"end-{turn}"))))
        last = {end.rank: end for end in self._read}
        return [end for end in self._read if end is last[end.rank]]

    def has_exits(self) -> bool:
        """Whether a rank has published how it ended."""
        return self._is_flagged("end-1")

    def has_killed_ranks(self) -> bool:
        """Return whether the process of a rank under the same agent has ended, and has not published its end.

        NCCL may never report it, and a rank in a CUDA call hears no SIGTERM; the agent's SIGKILL follows after 30 s.
        """
        world, processes = self._world, Path("/proc")
        # only ranks of this agent: process IDs of another one may belong to another machine
        agents = world.agent_ids if world.agent_dir is not None and processes.is_dir() else ()
        local = [rank for rank, agent in enumerate(agents) if agent == agents[world.rank]]
        gone = [rank for rank in local if not (processes / str(world.pids[rank])).exists()]
        with suppress(RuntimeError):  # as below
            return any(self.store is not None and not self.store.check([f"left-{rank}"]) for rank in gone)
        return False

    def add_progress(self, own: int) -> int | None:
        """Add this rank's progress since the last call; returns the total of all ranks, None without a store."""
        with suppress(RuntimeError):  # the rank or agent that held the store may be gone
            return self.store.add("moves", own) if self.store is not None else None
        return None

    def is_hang(self) -> bool:
        """Whether a rank has flagged a hang."""
        return self._is_flagged("hang")

    def flag_hang(self) -> None:
        """Make every rank publish its position, and end."""
        self._flag("hang")

    def flag_departure(self) -> None:
        """Publish that the process of this rank may end from now on."""
        self._flag(f"left-{self._world.rank}")

    def _flag(self, name: str) -> None:
        if self.store is not None:
            with suppress(RuntimeError):  # the rank or agent that held the store may have ended
                self.store.set(name, "")

    def _is_flagged(self, name: str) -> bool:
        try:
            return self.store is not None and self.store.check([name])
        except RuntimeError:  # the agent is gone with its store, and will end this process
            return False


def read_previous_cause(world: World) -> str | None:
    """Why the previous attempt ended; None in the first attempt."""
    if not world.attempt:
        return None
    return world.previous_attempt.cause if world.previous_attempt else "all workers ended without an error message"
