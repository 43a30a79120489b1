"""Buffers (BatchNorm's running statistics) that do not depend on which worker runs which micro-batch.

Within a step every micro-batch starts from the same buffers; at its end they move by the mean of what the micro-batches
would have changed. With one micro-batch a step that is exactly what torch does; with several, one worker that runs them
in turn and several that run them in parallel get the same result. Constants keep their bits: the mean is of changes.
Whole numbers move by the mean towards zero, in whole numbers; a flag changes if any micro-batch changed it.
"""

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from multigpu_cli.errors import TrainingError

_HALF = 32  # bits: a sum of such halves is exact in float64


class StepBuffers:
    """Keeps a model's buffers the same over micro-batches and workers.

    `total` sums a flat tensor over all workers, in place. `always` goes by changes for a lone micro-batch too: start +
    change may differ from the value in its last bit.
    """

    def __init__(
        self, model: nn.Module, workers: int, total: Callable[[Tensor], Tensor], *, always: bool = False
    ) -> None:
        self._slots = _find_slots(model)
        buffers = [slot.buffer for slot in self._slots]
        real = [torch.view_as_real(buffer) if buffer.is_complex() else buffer for buffer in buffers]
        self._groups = [_DtypeGroup([b for b in real if b.dtype == dtype]) for dtype in {b.dtype: None for b in real}]
        self._shared, self._total = workers > 1 or always, total
        self._micro_batches = 1

    @property
    def _by_changes(self) -> bool:
        return self._micro_batches > 1 or self._shared

    def begin_step(self, micro_batches: int) -> None:
        """Record the values at the step's start."""
        self._micro_batches = micro_batches
        if not self._groups:
            return
        self._rebind()
        for group in self._groups:
            group.begin()

    def no_change(self) -> list[Tensor]:
        """What `take_change` returns for a micro-batch that changes nothing: zeros."""
        return [group.zeros() for group in self._floating()]

    def take_change(self) -> list[Tensor]:
        """The change of floating buffers by the last micro-batch; afterwards all buffers have their start values.

        Changes of integers are added up here, because their sum is the same in any order.
        """
        self._rebind()
        changes = []
        for group in self._groups:
            change = group.take()
            if group.floating:
                changes.append(change)
            else:
                group.add(change)
        return changes

    def collect(self) -> None:
        """After one micro-batch: add its change to those of the others on this worker."""
        if self._groups and self._by_changes:
            for group, change in zip(self._floating(), self.take_change(), strict=True):
                group.add(change)

    def abort_step(self) -> None:
        """Restore the start values of a step that can't be finished."""
        self._rebind()
        for group in self._groups:
            group.write(group.start)

    def rollback(self, skipped: Tensor) -> None:
        """Restore the start values if the step was skipped, so that no NaN stays in the statistics; no host sync."""
        for group in self._groups:
            group.write(torch.where(skipped.bool(), group.start, group.read()))

    def apply_mean_change(self, summed: list[Tensor] | None = None) -> None:
        """Apply the mean change of all micro-batches on all workers; of floating buffers it may be `summed` already."""
        if not self._groups:
            return
        self._rebind()
        if not self._by_changes:
            return
        if summed is not None:
            for group, change in zip(self._floating(), summed, strict=True):
                group.move(change, self._micro_batches)
        if to_reduce := [group for group in self._groups if summed is None or not group.floating]:
            sent = [group.pack() for group in to_reduce]
            parts = self._total(torch.cat(sent)).split([len(part) for part in sent])
            for group, part in zip(to_reduce, parts, strict=True):
                group.move(group.unpack(part), self._micro_batches)

    def _floating(self) -> list["_DtypeGroup"]:
        return [group for group in self._groups if group.floating]

    def _rebind(self) -> None:
        """Copy what forward bound to the buffers' names into the registered tensors."""
        for slot in self._slots:
            if slot.owner.get(slot.name) is not slot.buffer:
                slot.rebind(alone=not self._by_changes)


@dataclass(frozen=True, eq=False)
class _BufferSlot:
    """A module's buffer by name, and the tensor that was registered there."""

    owner: MutableMapping[str, Tensor | None]
    name: str
    buffer: Tensor
    full_name: str
    persistent: bool

    @torch.no_grad()
    def rebind(self, *, alone: bool) -> None:
        """Copy what is bound now into the registered tensor, and bind that again.

        A tensor of another size, such as positions or masks that grow for longer sequences, is left as it is.
        TrainingError, unless one micro-batch is `alone`: it is in checkpoints, and changes of its shape have no mean.
        """
        bound, shape = self.owner.get(self.name), tuple(self.buffer.shape)
        if bound is not None and bound.shape == shape:
            self.buffer.copy_(bound.detach())
            self.owner[self.name] = self.buffer
        elif self.persistent and not alone:
            now = "nothing" if bound is None else tuple(bound.shape)
            raise TrainingError(
                f"forward changed the buffer {self.full_name} from {shape} to {now}: changes of shape have no mean",
                remedy="register it with its final shape, or exclude it from the state: persistent=False",
            )


class _DtypeGroup:
    """All buffers of one dtype as one flat tensor, so that one kernel copies them all."""

    def __init__(self, buffers: list[Tensor]) -> None:
        self._buffers = buffers
        # changes are added up in this dtype where it is floating; those of integers in wider ones
        self.format, self.floating = buffers[0].dtype, buffers[0].is_floating_point()
        narrow = torch.int32 if self.format.itemsize <= 2 else torch.int64
        self._wide = self.format if self.floating else narrow

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
        """Record the start values, with no change."""
        self.start = self.read()
        self._change: Tensor | None = None

    def zeros(self) -> Tensor:
        """(n,) no change."""
        return torch.zeros_like(self.start, dtype=self._wide)

    def take(self) -> Tensor:
        """(n,) now minus start, which is restored; an infinite value that stays has changed by zero."""
        now = self.read()
        self.write(self.start)
        if self.floating:
            return torch.where(now == self.start, 0.0, now - self.start)
        return now.to(self._wide) - self.start.to(self._wide)

    def add(self, change: Tensor) -> None:
        """Add a change to those of this worker; may reuse its memory."""
        self._change = change if self._change is None else self._change.add_(change)

    def pack(self) -> Tensor:
        """(m,) float64, whose sum over workers is the sum of the changes."""
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
        """Apply the mean of the micro-batches' changes, given their sum."""
        if self.floating:
            moved = self.start + (change / micro_batches).to(self.format)
        elif self.format == torch.bool:
            moved = self.start ^ change.bool()
        else:
            mean = torch.div(change.long(), micro_batches, rounding_mode="trunc")
            moved = (self.start.long() + mean).to(self.format)
        self.write(moved)


def _find_slots(model: nn.Module) -> list[_BufferSlot]:
    """A slot for each registered tensor."""
    slots: dict[int, _BufferSlot] = {}
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                persistent = name not in module._non_persistent_buffers_set
                full_name = f"{path}.{name}" if path else name
                slots.setdefault(id(buffer), _BufferSlot(module._buffers, name, buffer, full_name, persistent))
    return list(slots.values())
