"""Stops a run: after a signal, when all ranks agree to leave at the same step, or after too many skipped steps."""

import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

import torch
from torch import Tensor

from multigpu_cli.distributed.world import World, all_reduce_max
from multigpu_cli.errors import TrainingError

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

    def steps_until_vote(self, step: int) -> int:
        """Return the number of steps from `step`, which had a vote, to the next vote."""
        return max(1, self._next - step)

    def _propose_interval(self, step: int) -> int:
        """Steps that fit into the interval, by the speed since the last vote."""
        now = time.monotonic()
        steps = 1 if self._last_step is None else step - self._last_step
        pace = (now - self._last_time) / steps
        self._last_step, self._last_time = step, now
        return max(1, min(_MOST_STEPS, int(_INTERVAL / max(pace, 1e-6))))


_IN_A_ROW = 10
_IN_A_ROW_FP16 = 30  # the loss scale halves at each overflow: finding it takes a few steps, but not thirty
_MAX_UNSTACKED = 1000  # steps are recorded at no cost, and stacked at times if nothing reads them for long


class SkippedStepLimit:
    """Follows the skipped steps of a run without a host sync in the step.

    The policy skip continues until too many come in a row; stop ends the run after the first, at the next reading. With
    `fp16`, overflows are expected, since the loss scale is searched by them.
    """

    def __init__(self, policy: str, device: torch.device, *, fp16: bool) -> None:
        self._stop = policy == "stop" and not fp16
        self._limit = _IN_A_ROW_FP16 if fp16 else _IN_A_ROW
        self._since: list[Tensor] = [torch.zeros(0, device=device)]  # the steps since the last reading, (n,) each
        self._fresh: list[Tensor] = []  # the newest of them, () each
        self._numbers: list[int] = []  # of all these steps: some may have been left out between them
        self._row, self._longest = 0, 0

    def record(self, step: int, skipped: Tensor) -> None:
        """Add one step, counted from 0: () 1.0 where it was skipped, 0.0 where not."""
        self._numbers.append(step)
        self._fresh.append(skipped)
        if len(self._fresh) == _MAX_UNSTACKED:
            self._stack_flags()

    def read(self) -> list[int]:
        """The steps skipped since the last reading, counted from 0 (a host sync)."""
        self._stack_flags()
        flags, numbers = torch.cat(self._since).tolist(), self._numbers
        self._since, self._numbers = self._since[:1], []
        for skipped in flags:
            self._row = self._row + 1 if skipped else 0
            self._longest = max(self._longest, self._row)
        return [step for step, skipped in zip(numbers, flags, strict=True) if skipped]

    def check_may_continue(self, skipped: list[int]) -> None:
        """Raise a TrainingError if too many steps were skipped in a row, or any at all under the policy stop."""
        if self._longest >= self._limit or (skipped and self._stop):
            raise TrainingError(
                f"the loss or its gradient was NaN or infinite in {self._longest} steps in a row, "
                f"up to step {skipped[-1] + 1}",
                remedy="a lower --lr, --max-grad-norm 0.5, or --amp off; check the data for NaN",
            )

    def _stack_flags(self) -> None:
        if self._fresh:
            self._since.append(torch.stack(self._fresh))
            self._fresh = []
