"""How long a worker waits for the others at the end of its backward pass: what overlap could not hide."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_MOST = 512  # pairs of CUDA events between two looks


class LastBucket:
    """From the moment this worker's last gradient is there until the reduction lets it go on.

    DDP reduces a bucket of gradients while backward is at work on the next ones; only the last bucket has nothing to
    hide behind, and in it a worker also waits for those that come later. On the CPU the host's clock is read; on
    CUDA events mark the places, so that no step waits for them.

    Args:
        parameters: those that get a gradient. Which of them is last shows in the first step.
    """

    def __init__(self, parameters: Iterable[Tensor], device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._now: Callable[[], Any] = _recorded if self._cuda else time.perf_counter
        self._ready: Any = None
        self._last: Tensor | None = None
        self._pairs: deque[tuple[Any, Any]] = deque(maxlen=_MOST)
        self._watches_all = True
        self._hooks = {p: p.register_post_accumulate_grad_hook(self._arrived) for p in parameters}

    def __enter__(self) -> None:
        """Begin the backward pass in which gradients travel, or an explicit reduction."""
        self._ready = self._now()

    def __exit__(self, *_: object) -> None:
        self._pairs.append((self._ready, self._now()))
        if self._watches_all and self._last is not None:
            for parameter, hook in self._hooks.items():
                if parameter is not self._last:
                    hook.remove()
            self._hooks = {self._last: self._hooks[self._last]}
            self._watches_all = False

    def read(self) -> float | None:
        """The mean seconds of the waits since the last call; None where there were none. Waits for the device."""
        pairs, self._pairs = self._pairs, deque(maxlen=_MOST)
        if not pairs:
            return None
        if self._cuda:
            pairs[-1][1].synchronize()
            seconds = [ready.elapsed_time(ended) / 1e3 for ready, ended in pairs]
        else:
            seconds = [ended - ready for ready, ended in pairs]
        return sum(map(float, seconds)) / len(seconds)

    def _arrived(self, parameter: Tensor) -> None:
        self._ready, self._last = self._now(), parameter


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
