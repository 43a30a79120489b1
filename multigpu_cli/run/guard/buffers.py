"""Buffers that a mean over micro-batches makes wrong: bounds, and slots that each micro-batch overwrites.

A pass from buffers that were moved far away shows what they are: a bound stays there, the slots of a queue get the same
values wherever they started, and the rest of it is what it was. A moving average does neither.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil, log2
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from multigpu_cli.run.guard import describe
from multigpu_cli.run.guard.findings import Finding
from multigpu_cli.run.guard.watch import Write, equal_tensors
from multigpu_cli.strategies.buffer_rules import find_rules

Values = Mapping[str, Tensor]  # of buffers, by name


class Ends(NamedTuple):
    """The values of buffers after passes that all began with the values `start`."""

    start: Values
    whole: Values  # after a whole batch
    halves: Sequence[Values]  # after its halves; [] if these can't be compared
    writes: Mapping[str, Write]


def read_buffers(model: nn.Module) -> Values:
    """Copy the floating buffers that have no rule, except those of torch's norms."""
    rules = find_rules(model)
    norms = {id(b) for m in model.modules() if isinstance(m, _NormBase) for b in m.buffers(recurse=False)}
    return {
        name: buffer.detach().clone()
        for name, buffer in model.named_buffers()
        if name not in rules and not is_lazy(buffer) and buffer.is_floating_point() and id(buffer) not in norms
    }


def find_meaningless(model: nn.Module, ends: Ends, run_from: Callable[[Values], Values]) -> Iterator[Finding]:
    """Yield findings for buffers that a mean makes wrong; `run_from` runs the whole batch from other values."""
    changed = {
        name: (ends.start[name], end)
        for name, end in ends.whole.items()
        if name in ends.start and end.shape == ends.start[name].shape and not equal_tensors(ends.start[name], end)
    }
    shifts = {name: _choose_shift(start, end) for name, (start, end) in changed.items() if end.isfinite().all()}
    if not shifts:
        return
    moved = {name: _find_base(*changed[name]) + shift for name, shift in shifts.items()}
    after = run_from(moved)
    groups: dict[str, list[str]] = {"infinite": [], "finite": [], "slots": []}
    for name in [name for name in shifts if name in after and after[name].shape == moved[name].shape]:
        start, end = changed[name]
        halves = [half[name] for half in ends.halves if name in half]
        if torch.equal(after[name], moved[name]):
            if start.isinf().any() or _is_bound_of_halves(end, halves, is_maximum=shifts[name] > 0):
                groups["infinite" if start.isinf().any() else "finite"].append(name)
        elif _has_slots(start, end, after[name], shifts[name]):
            groups["slots"].append(name)
    for case, names in groups.items():
        if names:
            yield describe.buffers(model, case, names, ends.writes)


def _find_base(start: Tensor, end: Tensor) -> Tensor:
    return torch.where(start.isinf(), end, start)


def _choose_shift(start: Tensor, end: Tensor) -> float:
    """Return a distance far beyond all values, a power of two: downwards for a possible minimum."""
    largest = float(torch.maximum(end.abs(), _find_base(start, end).abs()).max())
    distance = 2.0 ** ceil(log2(10 * (1 + largest)))
    return -distance if bool((end <= start).all()) else distance


def _is_bound_of_halves(end: Tensor, halves: Sequence[Tensor], *, is_maximum: bool) -> bool:
    """Return whether the whole batch has the greatest (or least) value of its halves, if these differ."""
    if len(halves) != 2 or equal_tensors(*halves):
        return False
    first, second = halves
    expected = torch.maximum(first, second) if is_maximum else torch.minimum(first, second)
    return bool(((end - expected).abs() <= 0.1 * (first - second).abs() + 1e-6 * end.abs()).all())


def _has_slots(start: Tensor, end: Tensor, after: Tensor, shift: float) -> bool:
    """Return whether one part was overwritten whatever it was, and the rest was kept, if not at the same place."""
    written = ((after - end).abs() <= 1e-6 * abs(shift)) & (end != start)
    kept = after == end + shift
    return bool(written.any() and kept.any() and (written | kept).all())
