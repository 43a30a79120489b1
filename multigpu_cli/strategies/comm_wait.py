"""How long a worker waits for the others at the end of its backward pass: what overlap could not hide."""

from collections.abc import Iterable

import torch
from torch import Tensor

from multigpu_cli.runtime.stopwatch import Stopwatch


class CommWait:
    """From the moment this worker's last gradient is there until the reduction lets it go on.

    DDP reduces a bucket of gradients while backward is at work on the next ones; only the last bucket has nothing to
    hide behind, and in it a worker also waits for those that come later.

    Args:
        parameters: those that get a gradient. Which of them is last shows in the first step.
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

    def read(self) -> float | None:
        """The mean seconds of the waits since the last call; None where there were none. Waits for the device."""
        seconds, waits = self._watch.read()
        return seconds / waits if waits else None

    def _record_arrival(self, parameter: Tensor) -> None:
        self._watch.__enter__()
        self._last = parameter
