"""A metric that is a function of outputs and targets, with one value for each sample."""

from collections.abc import Callable
from math import fsum, nan
from typing import Any

import torch
from torch import Tensor

from multigpu_cli.errors import TrainingError
from multigpu_cli.runtime.collectives import all_reduce_sum
from multigpu_cli.runtime.own_code_error import name_own_code
from multigpu_cli.runtime.world import World
from multigpu_cli.tasks.metrics.base import Metric, Moved, describe_value, to_tensor


class PerSampleMetric(Metric):
    """The mean of one value for each sample, or the sum of numerators over the sum of denominators.

    Each batch is summed in float64 into a slot of its own, which one worker fills; the slots are added without rounding
    (Shewchuk's fsum). So the bits do not depend on the number of workers.

    Args:
        function: outputs, targets → (n,) values, or a pair of them.
    """

    def __init__(self, name: str, code: str, function: Callable[[Any, Any], Any]) -> None:
        super().__init__(name, code)
        self._function = function

    def begin(self, batches: int, world: World) -> None:
        self._slots = torch.zeros(2, batches, dtype=torch.float64, device=world.device)

    def add(self, number: int, outputs: Any, targets: Any, samples: int) -> None:
        with name_own_code(f"{self.label}: it"):
            found = self._function(outputs, targets)
        parts = found if isinstance(found, tuple) and len(found) == 2 else (found,)
        for row, part in zip(self._slots, parts, strict=False):
            row[number] = self._check_shape(part, found, samples).double().sum()
        if len(parts) == 1:
            self._slots[1, number] = samples

    def _check_shape(self, part: Any, found: Any, samples: int) -> Tensor:
        values = to_tensor(part)
        if values is None or values.shape != (samples,) or values.is_complex():
            several = isinstance(found, tuple)
            returned = f"({', '.join(map(describe_value, found))})" if several else describe_value(found)
            raise TrainingError(
                f"{self.label}: it returned {returned} for {samples} samples",
                remedy="one value for each sample, (n,), or a pair of numerators and denominators, each (n,); for what "
                "is no mean over samples a class with update and compute",
            )
        return values

    def reduce(self, world: World, moved: Moved) -> float:
        numerators, denominators = all_reduce_sum(world, self._slots).tolist()
        try:
            return fsum(numerators) / fsum(denominators)
        except (ZeroDivisionError, ValueError, OverflowError):  # no sample has a share; infinities of both signs
            return nan
