"""The training loss over many steps, those of a journal line or an epoch: the same on any number of workers."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from multigpu_cli.checkpoint.snapshot import Progress
from multigpu_cli.runtime.collectives import all_reduce_sum
from multigpu_cli.runtime.world import World

_MAX_UNPACKED = 1000  # losses are packed into one tensor when more of them wait to be reduced


class LossMeter:
    """Keeps the losses of steps on the device until they are reduced, so that no step waits.

    A step's micro-batches are added without rounding, and the steps in their order, so that the means depend neither on
    the number of workers nor on when losses are reduced. A step whose loss is not finite was skipped: it is left out.

    Args:
        progress: the sums are in its `line_losses` and `epoch_losses`, and so in checkpoints.

    Attributes:
        last: mean loss of the last step that was reduced.
    """

    def __init__(self, world: World, progress: Progress, steps_per_epoch: int) -> None:
        self._world, self._progress, self._steps_per_epoch = world, progress, steps_per_epoch
        self.last = math.nan
        self._reset()

    def _reset(self) -> None:
        self._steps: list[tuple[int, int]] = []  # number, and micro-batches over all workers
        self._units: list[Tensor | int] = []
        self._places: list[int] = []  # of this worker's losses among the micro-batches of all steps
        self._unpacked: list[Tensor] = []  # () each
        self._packed: list[Tensor] = []  # (n,) each
        self._count = 0

    def add(self, step: int, micro_batches: int, losses: Mapping[int, Tensor], units: Tensor | int) -> None:
        """Add a step: its number from 0, the micro-batches and units of all workers, and this worker's loss sums.

        Args:
            losses: () each, by the number of the micro-batch in the step.
        """
        self._steps.append((step, micro_batches))
        self._units.append(units)
        self._places += [self._count + number for number in losses]
        self._unpacked += losses.values()
        self._count += micro_batches
        if len(self._unpacked) > _MAX_UNPACKED:
            self._pack()

    def _pack(self) -> None:
        if self._unpacked:
            self._packed.append(torch.stack([loss.reshape(()) for loss in self._unpacked]).double())
            self._unpacked = []

    def all_reduce_pending(self) -> None:
        """Reduce the steps since the last call; all workers call it together, and wait for their devices."""
        if not self._steps:
            return
        self._pack()
        slots = torch.zeros(self._count, dtype=torch.float64, device=self._world.device)
        if self._packed:
            slots[torch.tensor(self._places, device=slots.device)] = torch.cat(self._packed)
        values = iter(all_reduce_sum(self._world, slots).tolist())
        units = torch.stack([torch.as_tensor(count) for count in self._units]).tolist()
        for (step, micro_batches), count in zip(self._steps, units, strict=True):
            self._count_step(step, _sum([next(values) for _ in range(micro_batches)]), count)
        self._reset()

    def _count_step(self, step: int, loss: float, units: int) -> None:
        line, epoch, progress = self._progress.line_losses, step // self._steps_per_epoch, self._progress
        self.last = loss / max(1, units)
        if progress.epoch_losses[0] != epoch:
            progress.epoch_losses = [epoch, 0.0, 0]
        if math.isfinite(loss):
            line[0], line[1] = line[0] + loss, line[1] + units
            progress.epoch_losses[1] += loss
            progress.epoch_losses[2] += units
        progress.last["train_loss"] = _mean(*progress.epoch_losses[1:])

    def pop_mean_since_log(self) -> float:
        """The mean over all samples, or tokens, of the steps reduced since the last call; NaN if there is none."""
        mean, self._progress.line_losses = _mean(*self._progress.line_losses), [0.0, 0]
        return mean


def _mean(loss: float, units: float) -> float:
    return loss / units if units else math.nan


def _sum(losses: list[float]) -> float:
    """Without rounding; NaN where infinities of both signs meet."""
    try:
        return math.fsum(losses)
    except (ValueError, OverflowError):
        return math.nan
