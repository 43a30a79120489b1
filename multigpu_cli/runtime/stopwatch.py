"""Measures the waiting time of a device, without a host sync in the step."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

_MOST = 512  # pairs of CUDA events between two readings; if there were more, the sum is extrapolated from these


class Stopwatch:
    """Sums many short waits.

    On the CPU the host's clock is used. A GPU works asynchronously, so the host's clock would also count time in which
    the host waits for the GPU (a full queue, a blocking copy); CUDA events in its queue mark begin and end instead.

    Args:
        of_gpu: measure the current CUDA device.
        clock: a monotonic clock in seconds, for the CPU.
    """

    def __init__(self, *, of_gpu: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        self._now: Callable[[], Any] = _record_event if of_gpu else clock
        self._of_gpu = of_gpu
        self._began: Any = None
        self._forget()

    def _forget(self) -> None:
        self._seconds, self._count = 0.0, 0
        self._pairs: deque[tuple[Any, Any]] = deque(maxlen=_MOST)

    def __enter__(self) -> None:
        """Begin a wait; one that has begun already is restarted."""
        self._began = self._now()

    def __exit__(self, *_: object) -> None:
        now = self._now()
        self._count += 1
        if self._of_gpu:
            self._pairs.append((self._began, now))
        else:
            self._seconds += now - self._began

    def read(self) -> tuple[float, int]:
        """Seconds and number of all waits since the last call; waits for the device."""
        seconds, count = self._seconds, self._count
        if self._pairs:
            self._pairs[-1][1].synchronize()
            milliseconds = sum(began.elapsed_time(ended) for began, ended in self._pairs)
            seconds = milliseconds / 1e3 * count / len(self._pairs)
        self._forget()
        return seconds, count


def _record_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
