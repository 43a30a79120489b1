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
        always: go by changes for a lone micro-batch too: start + change may differ from the value in its last bit.
    """

    def __init__(
        self, model: nn.Module, workers: int, total: Callable[[Tensor], Tensor], *, always: bool = False
    ) -> None:
        self._all = [torch.view_as_real(b) if b.is_complex() else b for b in model.buffers()]
        self._together, self._total = workers > 1 or always, total
        self._micro_batches = 1
        self._kinds = [[b for b in self._all if b.dtype == kind] for kind in {b.dtype: None for b in self._all}]
        self._before: list[Tensor] = []  # one flat copy for each kind
        self._start: list[Tensor] = []
        self._change: list[Tensor] = []

    def begin(self, micro_batches: int) -> None:
        """Note where the step starts; nothing to do where one micro-batch is all there is."""
        self._micro_batches = micro_batches
        self._start, self._change = [], []
        if self._all:
            self._before = [_flat(kind) for kind in self._kinds]
            if micro_batches > 1 or self._together:
                self._start = [buffer.detach().clone() for buffer in self._all]
                self._change = self.no_change()

    def no_change(self) -> list[Tensor]:
        """Zeros, as a micro-batch that changes nothing would give."""
        return [torch.zeros_like(buffer, dtype=_wide(buffer)) for buffer in self._all] if self._start else []

    @torch.no_grad()
    def taken(self) -> list[Tensor]:
        """What the micro-batch that has just run changed; the buffers are back at the start afterwards."""
        changes = []
        for buffer, start in zip(self._all, self._start, strict=bool(self._start)):
            changes.append(_moved(start, buffer))
            buffer.copy_(start)
        return changes

    def collect(self) -> None:
        """After one micro-batch: add its change to those of the others on this worker."""
        if not self._change:
            return
        for change, fresh in zip(self._change, self.taken(), strict=True):
            change += fresh

    @torch.no_grad()
    def abandon(self) -> None:
        """Go back to the start of a step that can't be finished."""
        for kind, before in zip(self._kinds, self._before, strict=True):
            _put_back(kind, before)
        self._start, self._change = [], []

    def undo(self, skipped: Tensor) -> None:
        """Go back to the start if the step was skipped, or a NaN would stay in the statistics; no host sync."""
        for kind, before in zip(self._kinds, self._before, strict=True):
            _put_back(kind, torch.where(skipped.bool(), before, _flat(kind)))

    def finish(self) -> None:
        """After the last: move by the mean change of all micro-batches on all workers."""
        if self._change:
            flat = self._total(torch.cat([change.flatten().double() for change in self._change]))
            parts = flat.split([change.numel() for change in self._change])
            self.move([part.view_as(change) for part, change in zip(parts, self._change, strict=True)])

    @torch.no_grad()
    def move(self, changes: list[Tensor]) -> None:
        """Move by the sum of all micro-batches' changes, divided by their number."""
        for buffer, change in zip(self._all, changes, strict=bool(changes)):
            buffer += (change / self._micro_batches).to(buffer.dtype)


@torch.no_grad()
def _flat(buffers: list[Tensor]) -> Tensor:
    """(n,) a copy of all elements: one kernel, where a copy of each would be hundreds in a deep network."""
    return torch.cat([buffer.flatten() for buffer in buffers])


@torch.no_grad()
def _put_back(buffers: list[Tensor], flat: Tensor) -> None:
    parts = flat.split([buffer.numel() for buffer in buffers])
    torch._foreach_copy_(buffers, [part.view_as(buffer) for part, buffer in zip(parts, buffers, strict=True)])


def _moved(start: Tensor, end: Tensor) -> Tensor:
    """End minus start; an infinite mask that stays has moved by zero, and a counter may be beyond what floats hold."""
    if not end.is_floating_point():
        return (end.long() - start.long()).to(_wide(end))
    return torch.where(end == start, 0.0, end - start)


def _wide(buffer: Tensor) -> torch.dtype:
    return buffer.dtype if buffer.is_floating_point() else torch.float32
