"""How the ranks of an attempt ended: published in the launcher's store, which outlives them all."""

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from multigpu_cli.errors import FAILED
from multigpu_cli.faults.deadline_store import DeadlineStore
from multigpu_cli.runtime.restart_records import PreviousAttempt, record_end
from multigpu_cli.runtime.world import World

_LONGEST = 20_000  # characters of a stack


@dataclass(frozen=True)
class RankExit:
    """How one rank ended.

    Attributes:
        place: where in the run it stood, in words.
        problem: the exception's type and message.
        stack: its traceback.
        consequence: it only lost the others.
        exit_code: that it leaves with.
        samples: the batch at work, by sample number.
    """

    rank: int
    place: str
    problem: str
    stack: str
    consequence: bool
    exit_code: int = FAILED
    samples: Sequence[int] = ()


class RankExits:
    """What the ranks of this attempt tell each other at their end; alone, everything stays here.

    Attributes:
        store: what they tell it over, None in a world of one.
    """

    def __init__(self, world: World) -> None:
        self._world, self.store = world, DeadlineStore(world.store) if world.store is not None else None
        self._own: list[RankExit] = []

    def publish(self, end: RankExit) -> None:
        """Leave this rank's word; the first come is the first told."""
        self._own.append(end)
        if self.store is not None:
            with suppress(RuntimeError):  # the store may have gone with the rank or the agent that held it
                turn = self.store.add("ends", 1)
                self.store.set(f"end-{turn}", json.dumps(asdict(end) | {"stack": end.stack[-_LONGEST:]}))

    def wait_for_exits(self, *, patience: float = 0.0) -> list[RankExit]:
        """Everybody's words in the order they came; waits so long (seconds) for those that have said nothing yet."""
        if self.store is None:
            return self._own
        deadline = time.monotonic() + patience
        try:
            while (told := self.store.add("ends", 0)) < self._world.size and time.monotonic() < deadline:
                time.sleep(0.05)
            return [RankExit(**json.loads(self.store.get(f"end-{turn}"))) for turn in range(1, told + 1)]
        except RuntimeError:  # nobody can be heard without the store
            return self._own

    def has_exits(self) -> bool:
        """Whether some rank has told its end."""
        return self._is_flagged("end-1")

    def count_moves(self, own: int) -> int | None:
        """How often all ranks together have moved; None where nobody knows.

        Args:
            own: how often this one did since it was last asked.
        """
        if self.store is None:
            return None
        try:
            return self.store.add("moves", own)
        except RuntimeError:
            return None

    def is_hang(self) -> bool:
        """Whether some rank called a hang."""
        return self._is_flagged("hang")

    def call_hang(self) -> None:
        """Let every rank say where it stands, and end."""
        if self.store is not None:
            with suppress(RuntimeError):  # each rank has a clock of its own
                self.store.set("hang", "")

    def _is_flagged(self, name: str) -> bool:
        try:
            return self.store is not None and self.store.check([name])
        except RuntimeError:  # the store has gone with the agent, and we are about to follow
            return False

    def record_cause(self, text: str, step: int | None, moved: float) -> None:
        """Leave the cause for the next attempt.

        Args:
            step: optimizer steps done, None before the first.
            moved: when this rank last made progress, in Unix seconds.
        """
        record_end(self._world.agent_dir, self._world.attempt, PreviousAttempt(text, step, moved))


def read_previous_cause(world: World) -> str | None:
    """Why the attempt before this one ended; None where there was none."""
    if not world.attempt:
        return None
    return world.previous_attempt.cause if world.previous_attempt else "all workers ended without a word"
