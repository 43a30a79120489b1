"""Stopping in good order: a signal is noted, and all ranks leave at the same step, or none does."""

import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

from multigpu_cli.runtime.collectives import all_reduce_max
from multigpu_cli.runtime.world import World

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_INTERVAL = 0.5  # seconds between two rounds of agreement
_MOST_STEPS = 1000
_ECHO = 1.0  # seconds; Ctrl-C reaches a worker from the terminal and once more from its agent


class StopRequest:
    """Notes SIGTERM, SIGINT and SIGUSR1 while the context lasts; a second SIGINT stops at once."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self._since = 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._since = signal.Signals(number).name, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._since > _ECHO:
            raise KeyboardInterrupt


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT and SIGTERM raise KeyboardInterrupt as long as the context lasts, so that what is open closes."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopConsensus:
    """Lets ranks agree, every half second or so, on wishes that each may have at another moment.

    The steps at which they meet are counted, not timed: all ranks take the same interval, the shortest that anyone
    proposes, so that nobody waits alone in a collective. In a world of one every step is a meeting.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._next = 0
        self._last_step: int | None = None  # a resumed run begins at any step
        self._last_time = time.monotonic()

    def vote(self, step: int, wishes: Iterable[bool]) -> list[bool]:
        """Which wishes somebody has; all False between meetings."""
        wanted = list(wishes)
        if self._world.size == 1:
            return wanted
        if step < self._next:
            return [False] * len(wanted)
        *granted, closest = all_reduce_max(self._world, [*map(float, wanted), -float(self._proposal(step))])
        self._next = step + int(-closest)
        return [wish > 0 for wish in granted]

    def _proposal(self, step: int) -> int:
        """Steps that fit into the interval, from the pace since the last meeting."""
        now = time.monotonic()
        steps = 1 if self._last_step is None else step - self._last_step
        pace = (now - self._last_time) / steps
        self._last_step, self._last_time = step, now
        return max(1, min(_MOST_STEPS, int(_INTERVAL / max(pace, 1e-6))))
