"""Buffers (BatchNorm's running statistics) that do not depend on how micro-batches fall to workers.

Within a step every micro-batch starts from the same buffers; at its end they move by the mean of what the micro-batches
would have changed. With one micro-batch a step that is exactly what torch does; with several, one worker that runs them
in turn and several that run them side by side end alike. Mean of changes, not of values: constants keep their bits.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class StepBuffers:
    """Keeps a model's buffers in step over micro-batches and workers.

    Args:
        model: its buffers are watched.
        workers: how many processes share a step.
        total: sums a flat tensor over all workers, in place.
    """

    def __init__(self, model: nn.Module, workers: int, total: Callable[[Tensor], Tensor]) -> None:
        self._all = list(model.buffers())
        self._workers, self._total = workers, total
        self._micro_batches = 1
        self._start: list[Tensor] = []
        self._change: list[Tensor] = []

    def begin(self, micro_batches: int) -> None:
        """Note where the step starts; nothing to do where one micro-batch is all there is."""
        self._micro_batches = micro_batches
        self._start, self._change = [], []
        if self._all and (micro_batches > 1 or self._workers > 1):
            self._start = [buffer.detach().clone() for buffer in self._all]
            self._change = [torch.zeros_like(buffer, dtype=_wide(buffer)) for buffer in self._all]

    @torch.no_grad()
    def collect(self) -> None:
        """After one micro-batch: put its change aside and go back to the start."""
        if not self._start:
            return
        for buffer, start, change in zip(self._all, self._start, self._change, strict=True):
            change += buffer.to(change.dtype) - start.to(change.dtype)
            buffer.copy_(start)

    @torch.no_grad()
    def finish(self) -> None:
        """After the last: move by the mean change of all micro-batches on all workers."""
        if not self._start:
            return
        flat = self._total(torch.cat([change.flatten().double() for change in self._change]))
        flat /= self._micro_batches
        for buffer, mean in zip(self._all, flat.split([buffer.numel() for buffer in self._all]), strict=True):
            buffer += mean.view_as(buffer).to(buffer.dtype)


def _wide(buffer: Tensor) -> torch.dtype:
    return buffer.dtype if buffer.is_floating_point() else torch.float64
