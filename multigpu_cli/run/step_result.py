"""What an optimizer step returns."""

from typing import NamedTuple

import torch
from torch import Tensor


class StepResult(NamedTuple):
    """The result of one step: tensors that stay on the device until they are logged.

    Attributes:
        micro_batches: of the step, over all workers.
        losses: () loss sums of this worker's micro-batches, by their number in the step.
        grad_norm: () of the global gradient.
        skipped: () 1 where the optimizer skipped the step.
    """

    micro_batches: int
    losses: dict[int, Tensor]
    grad_norm: Tensor
    skipped: Tensor

    def losses_by_micro_batch(self, device: torch.device) -> Tensor:
        """(micro-batches,) float64: this worker's loss sums in their slots, zeros elsewhere."""
        slots = torch.zeros(self.micro_batches, dtype=torch.float64, device=device)
        for number, loss in self.losses.items():
            slots[number] = loss
        return slots
