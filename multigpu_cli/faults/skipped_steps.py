"""Counts the steps that were skipped for a gradient that was not finite, and ends a run that has too many."""

import torch
from torch import Tensor

from multigpu_cli.errors import TrainingError

_IN_A_ROW = 10
_IN_A_ROW_FP16 = 30  # the loss scale halves at each overflow: finding it takes a few steps, but not thirty
_MAX_UNSTACKED = 1000  # steps are recorded at no cost, and stacked at times if nothing reads them for long


class SkippedStepLimit:
    """Follows the skipped steps of a run without a host sync in the step.

    Args:
        policy: skip continues until too many come in a row; stop ends the run after the first, at the next reading.
        fp16: overflows are expected, since the loss scale is searched by them.
    """

    def __init__(self, policy: str, device: torch.device, *, fp16: bool) -> None:
        self._stop = policy == "stop" and not fp16
        self._limit = _IN_A_ROW_FP16 if fp16 else _IN_A_ROW
        self._since: list[Tensor] = [torch.zeros(0, device=device)]  # the steps since the last reading, (n,) each
        self._fresh: list[Tensor] = []  # the newest of them, () each
        self._numbers: list[int] = []  # of all these steps: some may have been left out between them
        self._row, self._longest = 0, 0

    def record(self, step: int, skipped: Tensor) -> None:
        """Add one step, counted from 0: () 1.0 where it was skipped, 0.0 where not."""
        self._numbers.append(step)
        self._fresh.append(skipped)
        if len(self._fresh) == _MAX_UNSTACKED:
            self._stack_flags()

    def read(self) -> list[int]:
        """The steps skipped since the last reading, counted from 0 (a host sync)."""
        self._stack_flags()
        flags, numbers = torch.cat(self._since).tolist(), self._numbers
        self._since, self._numbers = self._since[:1], []
        for skipped in flags:
            self._row = self._row + 1 if skipped else 0
            self._longest = max(self._longest, self._row)
        return [step for step, skipped in zip(numbers, flags, strict=True) if skipped]

    def check_may_continue(self, skipped: list[int]) -> None:
        """Check whether training may continue after these skipped steps.

        Raises:
            TrainingError: too many in a row, or any at all under the policy stop.
        """
        if self._longest >= self._limit or (skipped and self._stop):
            raise TrainingError(
                f"the loss or its gradient was NaN or infinite in {self._longest} steps in a row, "
                f"up to step {skipped[-1] + 1}",
                remedy="a lower --lr, --max-grad-norm 0.5, or --amp off; check the data for NaN",
            )

    def _stack_flags(self) -> None:
        if self._fresh:
            self._since.append(torch.stack(self._fresh))
            self._fresh = []
