"""A metric of sums over the split, such as the counts of a confusion matrix."""

from collections.abc import Callable
from math import fsum, inf, nan
from typing import Any

import torch
from torch import Tensor

from multigpu_cli.errors import TrainingError
from multigpu_cli.runtime.collectives import all_reduce_max, all_reduce_sum
from multigpu_cli.runtime.own_code_error import name_own_code
from multigpu_cli.runtime.raise_on_all_ranks import run_on_main_rank
from multigpu_cli.runtime.world import World
from multigpu_cli.tasks.metrics.base import Metric, Moved, describe_value, to_tensor

_SAME_LENGTH = "a tensor (k,), with the same k for every batch, of sums over the samples of the batch"


class SummedMetric(Metric):
    """An object with `sums(outputs, targets)`, (k,) for a batch, and `compute` of their sum over the split.

    Whole numbers are added as int64. Others have a slot for each batch, and the slots are added without rounding, as
    float64.

    Args:
        make: a fresh object for each evaluation.
    """

    def __init__(self, name: str, code: str, make: Callable[[], Any]) -> None:
        super().__init__(name, code)
        self._make = make

    def begin(self, batches: int, world: World) -> None:
        self._object, self._batches = self._make(), batches
        self._whole: Tensor | None = None  # (k,) int64
        self._parts: dict[int, Tensor] = {}  # (k,) float64, by the number of the batch

    def add(self, number: int, outputs: Any, targets: Any, samples: int) -> None:
        with name_own_code(f"{self.label}: sums"):
            found = self._object.sums(outputs, targets)
        sums, before = to_tensor(found), self._whole if self._whole is not None else next(iter(self._parts.values()), 0)
        same = isinstance(before, int) or (sums is not None and sums.shape == before.shape)
        if sums is None or sums.ndim != 1 or not same or sums.is_complex():
            raise TrainingError(
                f"{self.label}: sums returned {describe_value(found)}",
                remedy=_SAME_LENGTH,
            )
        if sums.is_floating_point():
            self._parts[number] = sums.double()
        else:
            self._whole = sums.long() if self._whole is None else self._whole + sums

    def reduce(self, world: World, moved: Moved) -> float:
        known = self._whole if self._whole is not None else next(iter(self._parts.values()), None)
        own = 0 if known is None else known.numel()
        other = -own if own else -inf  # the shortest, as a maximum; a rank without batches has none
        size, shortest, real, whole = all_reduce_max(world, [own, other, bool(self._parts), self._whole is not None])
        if -shortest < size:
            raise TrainingError(
                f"{self.label}: sums returned {-shortest:.0f} numbers for some batches and {size:.0f} for others",
                remedy=_SAME_LENGTH,
            )
        if real and whole:
            raise TrainingError(f"{self.label}: sums returned whole numbers for some batches only", remedy="one type")
        sums = self._add_parts(world, int(size)) if real else self._add_whole(world, int(size))

        def compute() -> float:
            with name_own_code(f"{self.label}: compute"):
                value = self._object.compute(sums)
            return self.parse_number(value)

        return run_on_main_rank(world, compute)

    def _add_whole(self, world: World, size: int) -> Tensor:
        """(k,) int64"""
        own = torch.zeros(size, dtype=torch.int64, device=world.device) if self._whole is None else self._whole
        return all_reduce_sum(world, own.to(world.device)).cpu()

    def _add_parts(self, world: World, size: int) -> Tensor:
        """(k,) float64"""
        slots = torch.zeros(size, self._batches, dtype=torch.float64, device=world.device)
        for number, sums in self._parts.items():
            slots[:, number] = sums
        return torch.tensor([_add(row) for row in all_reduce_sum(world, slots).tolist()], dtype=torch.float64)


def _add(values: list[float]) -> float:
    try:
        return fsum(values)
    except (ValueError, OverflowError):  # infinities of both signs
        return nan
