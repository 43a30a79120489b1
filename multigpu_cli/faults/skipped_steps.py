"""Steps that were skipped because the gradient was not finite: noted on the device, judged when someone looks."""

import torch
from torch import Tensor

from multigpu_cli.errors import TrainingError

_IN_A_ROW = 10
_IN_A_ROW_FP16 = 30  # the loss scale halves at each overflow: finding it takes a few steps, but not thirty
_MOST_LOOSE = 1000  # steps are noted at no cost, and packed now and then where nobody reads for long


class NonfiniteGuard:
    """Follows the skipped steps of a run without a host sync in the step.

    Args:
        policy: skip goes on until too many come in a row; stop ends the run at the first, when it is next looked at.
        fp16: overflows belong to the search for the loss scale.
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
        if len(self._fresh) == _MOST_LOOSE:
            self._pack()

    def read(self) -> list[int]:
        """The steps skipped since the last reading, counted from 0 (a host sync)."""
        self._pack()
        flags, numbers = torch.cat(self._since).tolist(), self._numbers
        self._since, self._numbers = self._since[:1], []
        for skipped in flags:
            self._row = self._row + 1 if skipped else 0
            self._longest = max(self._longest, self._row)
        return [step for step, skipped in zip(numbers, flags, strict=True) if skipped]

    def check_may_continue(self, skipped: list[int]) -> None:
        """Whether training may go on after these steps.

        Raises:
            TrainingError: too many in a row, or any at all under the policy stop.
        """
        if self._longest >= self._limit or (skipped and self._stop):
            raise TrainingError(
                f"the loss or its gradient was NaN or infinite in {self._longest} steps in a row, "
                f"up to step {skipped[-1] + 1}",
                remedy="a lower --lr, --max-grad-norm 0.5, or --amp off; check the data for NaN",
            )

    def _pack(self) -> None:
        if self._fresh:
            self._since.append(torch.stack(self._fresh))
            self._fresh = []
