"""Buffers (BatchNorm's running statistics) that do not depend on which worker runs which micro-batch.

Within a step every micro-batch starts from the same buffers; at its end they move by the mean of what the micro-batches
would have changed. With one micro-batch a step that is exactly what torch does; with several, one worker that runs them
in turn and several that run them in parallel get the same result. Constants keep their bits: the mean is of changes.
Whole numbers move by the mean towards zero, in whole numbers; a flag changes if any micro-batch changed it. From an
infinite value a buffer moves to the mean of the values. A model may name other rules than the mean: `find_rules`.
"""

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from functools import reduce
from math import nan

import torch
from torch import Tensor, nn

from multigpu_cli.errors import TrainingError
from multigpu_cli.strategies.buffer_rules import MERGES, find_rules

_HALF = 32  # bits: a sum of such halves is exact in float64


class StepBuffers:
    """Keeps a model's buffers the same over micro-batches and workers.

    `total` sums a flat tensor over all workers, in place; `gather` returns those of all workers. `always` goes by
    changes for a lone micro-batch too: start + change may differ from the value in its last bit.
    """

    def __init__(
        self,
        model: nn.Module,
        workers: int,
        total: Callable[[Tensor], Tensor],
        gather: Callable[[Tensor], list[Tensor]] = lambda value: [value],  # one worker has no others
        *,
        always: bool = False,
    ) -> None:
        self._slots, rules = _find_slots(model), find_rules(model)
        alike: dict[tuple[torch.dtype, str], list[Tensor]] = {}
        for slot in self._slots:
            real = torch.view_as_real(slot.buffer) if slot.buffer.is_complex() else slot.buffer
            alike.setdefault((real.dtype, rules.get(slot.full_name, "mean")), []).append(real)
        self._groups = [_DtypeGroup(b, total=rule == "sum") for (_, rule), b in alike.items() if rule not in MERGES]
        self._values = [_ValueGroup(b, MERGES[rule]) for (_, rule), b in alike.items() if rule in MERGES]
        self._shared, self._total, self._gather = workers > 1 or always, total, gather
        self._micro_batches = 1

    @property
    def _by_changes(self) -> bool:
        return self._micro_batches > 1 or self._shared

    def begin_step(self, micro_batches: int) -> None:
        """Record the values at the step's start."""
        self._micro_batches = micro_batches
        if not self._slots:
            return
        self._rebind()
        for group in (*self._groups, *self._values):
            group.begin()

    def no_change(self) -> list[Tensor]:
        """What `take_change` returns for a micro-batch that changes nothing: zeros."""
        return [group.zeros() for group in self._floating()]

    def take_change(self, number: int = 0) -> list[Tensor]:
        """The change of floating buffers by micro-batch `number`; afterwards all buffers have their start values.

        Changes of integers, and values that merge, are collected here, because the result is the same in any order.
        """
        self._rebind()
        for values in self._values:
            values.add(values.take(), number)
        changes = []
        for group in self._groups:
            change = group.take()
            if group.floating:
                changes.append(change)
            else:
                group.add(change)
        return changes

    def collect(self, number: int = 0) -> None:
        """After micro-batch `number` of the step: add its change to those of the others on this worker."""
        if self._slots and self._by_changes:
            for group, change in zip(self._floating(), self.take_change(number), strict=True):
                group.add(change)

    def abort_step(self) -> None:
        """Restore the start values of a step that can't be finished."""
        self._rebind()
        for group in (*self._groups, *self._values):
            group.write(group.start)

    def rollback(self, skipped: Tensor) -> None:
        """Restore the start values if the step was skipped, so that no NaN stays in the statistics; no host sync."""
        for group in (*self._groups, *self._values):
            group.write(torch.where(skipped.bool(), group.start, group.read()))

    def apply_mean_change(self, summed: list[Tensor] | None = None) -> None:
        """Apply the mean change of all micro-batches on all workers.

        `summed` holds the changes of floating buffers, if they are already summed over the workers. Buffers with
        another rule get the result of that rule.
        """
        if not self._slots:
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
        for values in self._values:
            values.merge(self._gather)

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


class _Flat:
    """Buffers of one dtype as one flat tensor, so that one kernel copies them all."""

    def __init__(self, buffers: list[Tensor]) -> None:
        self._buffers = buffers

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


class _ValueGroup(_Flat):
    """Buffers whose values at the end of each micro-batch merge: the least, the greatest or the last one remains."""

    def __init__(self, buffers: list[Tensor], merge: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(buffers)
        self._merge = merge

    def begin(self) -> None:
        super().begin()
        self._merged, self._number = self.start, -1  # no micro-batch yet

    def take(self) -> Tensor:
        """(n,) the values now; the start values are restored."""
        now = self.read()
        self.write(self.start)
        return now

    def add(self, values: Tensor, number: int) -> None:
        """Merge the values that micro-batch `number` left; on a worker they come in order."""
        self._merged = values if self._number < 0 else self._merge(self._merged, values)
        self._number = number

    def merge(self, gather: Callable[[Tensor], list[Tensor]]) -> None:
        """Write what all workers' values merge to, in the order of their last micro-batches."""
        number = torch.tensor([self._number], device=self.start.device)
        own = torch.cat([self._merged.view(torch.uint8), number.view(torch.uint8)])  # bytes travel without rounding
        size = len(own) - number.itemsize
        parts = {int(part[size:].view(number.dtype)): part[:size].view(self.start.dtype) for part in gather(own)}
        parts.pop(-1, None)  # idle workers
        self.write(reduce(self._merge, (parts[last] for last in sorted(parts))))


class _DtypeGroup(_Flat):
    """Buffers of one dtype that move by changes: by their mean, or by their `total`."""

    def __init__(self, buffers: list[Tensor], *, total: bool = False) -> None:
        super().__init__(buffers)
        self._by_total = total
        # changes of floating buffers are added up in their own dtype, those of integer buffers in a wider one
        self.format, self.floating = buffers[0].dtype, buffers[0].is_floating_point()
        narrow = torch.int32 if self.format.itemsize <= 2 else torch.int64
        self._wide = self.format if self.floating else narrow

    def begin(self) -> None:
        super().begin()
        # infinity has no mean: a buffer moves from there to the mean of the values, which are changes of zero
        self._base = self.start.nan_to_num(nan=nan, posinf=0.0, neginf=0.0) if self.floating else self.start
        self._change: Tensor | None = None

    def zeros(self) -> Tensor:
        """(n,) no change."""
        return torch.zeros_like(self.start, dtype=self._wide)

    def take(self) -> Tensor:
        """(n,) now minus start, which is restored."""
        now = self.read()
        self.write(self.start)
        return now.to(self._wide) - self._base.to(self._wide)

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
        """Apply the micro-batches' changes, given their sum."""
        count = 1 if self._by_total else micro_batches
        if self.floating:
            moved = self._base + (change / count).to(self.format)
        elif self.format == torch.bool:
            moved = self.start ^ change.bool()
        else:
            mean = torch.div(change.long(), count, rounding_mode="trunc")
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
