"""Buffers (BatchNorm's running statistics) that do not depend on how micro-batches fall to workers.

Within a step every micro-batch starts from the same buffers; at its end they move by the mean of what the micro-batches
would have changed. With one micro-batch a step that is exactly what torch does; with several, one worker that runs them
in turn and several that run them side by side end alike. Mean of changes, not of values: constants keep their bits.
Whole numbers move by the mean towards zero, in whole numbers; a flag changes if any micro-batch changed it.
"""

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from multigpu_cli.errors import TrainingError

_HALF = 32  # bits: a sum of such halves is exact in float64


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
        self._places = _find_slots(model)
        buffers = [place.buffer for place in self._places]
        real = [torch.view_as_real(buffer) if buffer.is_complex() else buffer for buffer in buffers]
        self._kinds = [_DtypeGroup([b for b in real if b.dtype == dtype]) for dtype in {b.dtype: None for b in real}]
        self._shared, self._total = workers > 1 or always, total
        self._micro_batches = 1

    @property
    def _by_changes(self) -> bool:
        return self._micro_batches > 1 or self._shared

    def begin_step(self, micro_batches: int) -> None:
        """Note where the step starts."""
        self._micro_batches = micro_batches
        self._bring_home()
        for kind in self._kinds:
            kind.begin()

    def no_change(self) -> list[Tensor]:
        """Zeros, as a micro-batch that changes nothing would give in `take_change`."""
        return [kind.zeros() for kind in self._floating()]

    def take_change(self) -> list[Tensor]:
        """What the micro-batch that has just run changed in floating buffers; all are back at the start afterwards.

        What it changed in whole numbers is added up here: they have one sum in any order.
        """
        self._bring_home()
        changes = []
        for kind in self._kinds:
            change = kind.take()
            if kind.floating:
                changes.append(change)
            else:
                kind.add(change)
        return changes

    def collect(self) -> None:
        """After one micro-batch: add its change to those of the others on this worker."""
        if self._by_changes:
            for kind, change in zip(self._floating(), self.take_change(), strict=True):
                kind.add(change)

    def abort_step(self) -> None:
        """Go back to the start of a step that can't be finished."""
        self._bring_home()
        for kind in self._kinds:
            kind.write(kind.start)

    def rollback(self, skipped: Tensor) -> None:
        """Go back to the start if the step was skipped, or a NaN would stay in the statistics; no host sync."""
        for kind in self._kinds:
            kind.write(torch.where(skipped.bool(), kind.start, kind.read()))

    def apply_mean_change(self, summed: list[Tensor] | None = None) -> None:
        """After the last: move by the mean change of all micro-batches on all workers.

        Args:
            summed: the changes in floating buffers, where they have been added up over all workers already.
        """
        self._bring_home()
        if not self._by_changes:
            return
        if summed is not None:
            for kind, change in zip(self._floating(), summed, strict=True):
                kind.move(change, self._micro_batches)
        if travelling := [kind for kind in self._kinds if summed is None or not kind.floating]:
            sent = [kind.pack() for kind in travelling]
            parts = self._total(torch.cat(sent)).split([len(part) for part in sent])
            for kind, part in zip(travelling, parts, strict=True):
                kind.move(kind.unpack(part), self._micro_batches)

    def _floating(self) -> list["_DtypeGroup"]:
        return [kind for kind in self._kinds if kind.floating]

    def _bring_home(self) -> None:
        """Let registered tensors hold what forward put in their places."""
        for place in self._places:
            if place.owner.get(place.name) is not place.buffer:
                place.bring_home(alone=not self._by_changes)


@dataclass(frozen=True, eq=False)
class _BufferSlot:
    """Where a module keeps a buffer, and the tensor that is registered there."""

    owner: MutableMapping[str, Tensor | None]
    name: str
    buffer: Tensor
    full_name: str
    persistent: bool

    @torch.no_grad()
    def bring_home(self, *, alone: bool) -> None:
        """Copy what was bound here since into the registered tensor, and bind that again.

        A table of another size, as positions and masks grow for longer sequences, is left to its model.

        Raises:
            TrainingError: it is in checkpoints, and its changes have no mean; not where one micro-batch is `alone`.
        """
        bound, shape = self.owner.get(self.name), tuple(self.buffer.shape)
        if bound is not None and bound.shape == shape:
            self.buffer.copy_(bound.detach())
            self.owner[self.name] = self.buffer
        elif self.persistent and not alone:
            now = "nothing" if bound is None else tuple(bound.shape)
            raise TrainingError(
                f"forward changed the buffer {self.full_name} from {shape} to {now}: its changes have no mean",
                remedy="give it its shape when it is registered, or keep it out of the state: persistent=False",
            )


class _DtypeGroup:
    """All buffers of one number format, seen as one flat tensor: one kernel, where a copy of each would be hundreds.

    Attributes:
        floating: whether changes are added up in this format; those of whole numbers are in wider ones.
        start: (n,) what they were when the step began.
    """

    def __init__(self, buffers: list[Tensor]) -> None:
        self._buffers = buffers
        self.format, self.floating = buffers[0].dtype, buffers[0].is_floating_point()
        narrow = torch.int32 if self.format.itemsize <= 2 else torch.int64
        self._wide = self.format if self.floating else narrow
        self.begin()

    @torch.no_grad()
    def read(self) -> Tensor:
        """(n,) a copy of all elements."""
        return torch.cat([buffer.flatten() for buffer in self._buffers])

    @torch.no_grad()
    def write(self, flat: Tensor) -> None:
        """Write all elements."""
        parts = flat.split([buffer.numel() for buffer in self._buffers])
        views = [
            part if buffer.ndim == 1 else part.view_as(buffer)  # a view costs the host more than the copy
            for part, buffer in zip(parts, self._buffers, strict=True)
        ]
        torch._foreach_copy_(self._buffers, views)

    def begin(self) -> None:
        """Start from here, with no change."""
        self.start = self.read()
        self._change: Tensor | None = None

    def zeros(self) -> Tensor:
        """(n,) no change."""
        return torch.zeros_like(self.start, dtype=self._wide)

    def take(self) -> Tensor:
        """(n,) now minus start, which they are at again afterwards; an infinite mask that stays has moved by zero."""
        now = self.read()
        self.write(self.start)
        if self.floating:
            return torch.where(now == self.start, 0.0, now - self.start)
        return now.to(self._wide) - self.start.to(self._wide)

    def add(self, change: Tensor) -> None:
        """Add a change to those of this worker; its memory may be used."""
        self._change = change if self._change is None else self._change.add_(change)

    def pack(self) -> Tensor:
        """(m,) float64, of which the sum over workers is the sum of the changes."""
        change = self.zeros() if self._change is None else self._change
        if self._wide != torch.int64:
            return change.double()
        return torch.cat([change >> _HALF, change & (2**_HALF - 1)]).double()

    def unpack(self, summed: Tensor) -> Tensor:
        """(n,) the sum of the changes."""
        if self._wide != torch.int64:
            return summed
        high, low = summed.long().chunk(2)
        return (high << _HALF) + low

    def move(self, change: Tensor, micro_batches: int) -> None:
        """By the mean of so many changes, whose sum this is."""
        if self.floating:
            moved = self.start + (change / micro_batches).to(self.format)
        elif self.format == torch.bool:
            moved = self.start ^ change.bool()
        else:
            mean = torch.div(change.long(), micro_batches, rounding_mode="trunc")
            moved = (self.start.long() + mean).to(self.format)
        self.write(moved)


def _find_slots(model: nn.Module) -> list[_BufferSlot]:
    """One for each registered tensor."""
    slots: dict[int, _BufferSlot] = {}
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                persistent = name not in module._non_persistent_buffers_set
                full_name = f"{path}.{name}" if path else name
                slots.setdefault(id(buffer), _BufferSlot(module._buffers, name, buffer, full_name, persistent))
    return list(slots.values())
