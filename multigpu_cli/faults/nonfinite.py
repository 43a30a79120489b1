"""Steps that were skipped because the gradient was not finite: counted on the device, judged when someone looks."""

from typing import NamedTuple

import torch
from torch import Tensor

from multigpu_cli.errors import TrainingError

_IN_A_ROW = 10
_IN_A_ROW_FP16 = 30  # the loss scale halves at each overflow: finding it takes a few steps, but not thirty


class Skipped(NamedTuple):
    """Steps whose update was skipped.

    Attributes:
        fresh: how many since the last reading.
        longest: the most in a row so far.
        last: the newest of them, counted from 0; without meaning where there was none.
    """

    fresh: int
    longest: int
    last: int


class Nonfinite:
    """Follows the skipped steps of a run without a host sync in the step.

    Args:
        policy: skip goes on until too many come in a row; stop ends the run at the first, when it is next looked at.
        fp16: overflows belong to the search for the loss scale.
    """

    def __init__(self, policy: str, device: torch.device, *, fp16: bool) -> None:
        self._stop = policy == "stop" and not fp16
        self._limit = _IN_A_ROW_FP16 if fp16 else _IN_A_ROW
        self._total = torch.zeros((), device=device)
        self._row = torch.zeros((), device=device)
        self._longest = torch.zeros((), device=device)
        self._since = torch.zeros((), device=device)
        self._seen = 0

    def note(self, skipped: Tensor) -> None:
        """Add one step: () 1.0 where it was skipped, 0.0 where not."""
        self._total += skipped
        self._row = (self._row + skipped) * skipped
        self._longest = torch.maximum(self._longest, self._row)
        self._since = (self._since + 1) * (1 - skipped)

    def read(self, step: int) -> Skipped:
        """What was skipped since the last reading (a host sync).

        Args:
            step: steps done.
        """
        numbers = torch.stack([self._total, self._longest, self._since]).tolist()
        total, longest, since = (int(value) for value in numbers)
        fresh, self._seen = total - self._seen, total
        return Skipped(fresh, longest, step - since - 1)

    def judge(self, found: Skipped) -> None:
        """Whether training may go on.

        Raises:
            TrainingError: too many in a row, or any at all under the policy stop.
        """
        fresh, longest, last = found
        if longest >= self._limit or (fresh and self._stop):
            raise TrainingError(
                f"the loss or its gradient was NaN or infinite in {longest} steps in a row, up to step {last + 1}",
                remedy="a lower --lr, --max-grad-norm 0.5, or --amp off; check the data for NaN",
            )
