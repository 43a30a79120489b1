"""Measures exposed communication: how long a worker waits for the others at the end of its backward pass."""

from collections.abc import Iterable

import torch
from torch import Tensor

from multigpu_cli.runtime.stopwatch import Stopwatch


class CommWait:
    """Times from this worker's last gradient to the end of the reduction.

    DDP reduces a bucket of gradients while backward computes the next ones; only the last bucket overlaps with nothing,
    and there a worker also waits for slower ones.

    Args:
        parameters: those that get a gradient. The first step shows which of them is last.
    """

    def __init__(self, parameters: Iterable[Tensor], device: torch.device) -> None:
        self._watch = Stopwatch(of_gpu=device.type == "cuda")
        self._last: Tensor | None = None
        self._watches_all = True
        self._hooks = {p: p.register_post_accumulate_grad_hook(self._record_arrival) for p in parameters}

    def __enter__(self) -> None:
        """Begin the backward pass in which gradients travel, or an explicit reduction."""
        self._watch.__enter__()

    def __exit__(self, *_: object) -> None:
        self._watch.__exit__()
        if self._watches_all and self._last is not None:
            for parameter, hook in self._hooks.items():
                if parameter is not self._last:
                    hook.remove()
            self._hooks = {self._last: self._hooks[self._last]}
            self._watches_all = False

    def close(self) -> None:
        """Watch no parameter any more."""
        for hook in self._hooks.values():
            hook.remove()

    def read(self) -> float | None:
        """The mean seconds of the waits since the last call, or None; waits for the device."""
        seconds, waits = self._watch.read()
        return seconds / waits if waits else None

    def _record_arrival(self, parameter: Tensor) -> None:
        self._watch.__enter__()
        self._last = parameter
