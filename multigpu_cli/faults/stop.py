"""Stops a run after a signal: all ranks agree to leave at the same step."""

import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

from multigpu_cli.distributed.collectives import all_reduce_max
from multigpu_cli.distributed.world import World

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_INTERVAL = 0.5  # seconds between two votes
_MOST_STEPS = 1000
_ECHO = 1.0  # seconds; Ctrl-C reaches a worker twice: from the terminal, and from its agent


class StopRequest:
    """Records SIGTERM, SIGINT and SIGUSR1 within the context; a second SIGINT raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self._since = 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            self._before = {number: signal.signal(number, self._record) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _record(self, number: int, frame: FrameType | None) -> None:
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
    """Lets the ranks agree, about every half second, on requests that each may have at another moment.

    The interval is counted in steps: all ranks take the shortest one that a rank proposes, so that they enter the
    collective at the same step. In a world of one every step is a vote.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._next = 0
        self._last_step: int | None = None  # a resumed run begins at any step
        self._last_time = time.monotonic()

    def vote(self, step: int, requests: Iterable[bool]) -> list[bool]:
        """Which requests at least one rank has; all False between votes."""
        own = list(requests)
        if self._world.size == 1:
            return own
        if step < self._next:
            return [False] * len(own)
        *combined, closest = all_reduce_max(self._world, [*map(float, own), -float(self._propose_interval(step))])
        self._next = step + int(-closest)
        return [request > 0 for request in combined]

    def _propose_interval(self, step: int) -> int:
        """Steps that fit into the interval, by the speed since the last vote."""
        now = time.monotonic()
        steps = 1 if self._last_step is None else step - self._last_step
        pace = (now - self._last_time) / steps
        self._last_step, self._last_time = step, now
        return max(1, min(_MOST_STEPS, int(_INTERVAL / max(pace, 1e-6))))
