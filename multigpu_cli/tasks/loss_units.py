"""Averages a step's loss over other units than samples, such as tokens, whose number differs between samples."""

from collections.abc import Iterable

import torch
from torch import Tensor

from multigpu_cli.runtime.collectives import all_reduce_sum
from multigpu_cli.runtime.world import World
from multigpu_cli.tasks.base import Task


class LossNormalizer:
    """Counts the units of each step on the device, and rescales its gradient to the mean over them.

    The number is known only when all workers have fetched their samples, so losses are divided by the expected number,
    and gradients are corrected once they are reduced. With samples as units there is nothing to correct.

    Attributes:
        last: units of the last step, over all workers.
    """

    def __init__(self, task: Task, world: World) -> None:
        self._task, self._world = task, world
        self.last: Tensor | int = 0
        self._seen, self._samples = torch.zeros((), dtype=torch.int64, device=world.device), 0

    def divisor(self, samples: int) -> int:
        """The expected number of units, by which a step's loss is divided before backward."""
        return samples * self._task.units_per_sample

    def rescale_gradients(self, counted: Iterable[Tensor | int], samples: int, parameters: Iterable[Tensor]) -> None:
        """At the end of a step: correct the reduced gradient to the real number of units.

        The mean over no unit is NaN, so that the optimizer skips a step without any: momentum and decay would move the
        weights.

        Args:
            counted: units of this worker's micro-batches; there may be none.
            samples: of the step, over all workers.
        """
        self.last = samples
        if self._task.unit == "sample":
            return
        local = torch.zeros((), dtype=torch.int64, device=self._world.device)
        for count in counted:
            local += count
        self.last = all_reduce_sum(self._world, local)
        self._seen, self._samples = self._seen + self.last, self._samples + samples
        factor = self.divisor(samples) / self.last.double()
        gradients = [p.grad for p in parameters if p.grad is not None]
        for number in {gradient.dtype for gradient in gradients}:  # a kernel takes tensors and factor of one dtype
            same = [gradient for gradient in gradients if gradient.dtype == number]
            torch._foreach_mul_(same, factor.to(torch.promote_types(number, torch.float32)))

    def get_step_norm(self, norm: Tensor) -> Tensor:
        """The gradient norm () of the last step, for people: 0 where it had no unit."""
        return norm if isinstance(self.last, int) else torch.where(self.last > 0, norm, 0.0)

    def rate(self, samples_per_second: float) -> dict[str, float]:
        """For example `tokens_per_second` since the last call; {} if units are samples."""
        if self._task.unit == "sample" or not self._samples:
            return {}
        per_sample = float(self._seen) / self._samples
        self._seen, self._samples = torch.zeros_like(self._seen), 0
        return {f"{self._task.unit}s_per_second": samples_per_second * per_sample}
