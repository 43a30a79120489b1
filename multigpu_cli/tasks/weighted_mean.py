"""torch's cross-entropies over a global batch: a sum of weighted losses, and the sum of the weights to divide it by.

`nn.CrossEntropyLoss` and `nn.NLLLoss` divide by the weights of the labels in a micro-batch, where a label that is
ignored weighs nothing. The mean of such means is another loss at each size of micro-batch. Here both sums are taken
over the global batch, and divided once.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss

from multigpu_cli.errors import RequestError

_BITS = 30  # the greatest weight has 2²⁹ to 2³⁰ steps: finer than float32, and an int64 holds the sum of 2³³ labels


class WeightedMean:
    """The mean over a global batch of one of torch's cross-entropies, as a sum and its units.

    Units are weights in steps of `1 / scale`, so that they are whole numbers: their sum has no rounding, in any order
    and on any number of workers. The sum of losses is of the same rounded weights, times `scale`.

    Args:
        criterion: with `reduction="mean"`; its weights (classes,) may change while it trains.
    """

    def __init__(self, criterion: nn.CrossEntropyLoss | nn.NLLLoss) -> None:
        self._criterion, weight = criterion, criterion.weight
        if weight is not None and not (bool((weight >= 0).all()) and 0 < float(weight.max()) < torch.inf):
            problem = f"criterion: its weights range from {float(weight.min()):g} to {float(weight.max()):g}"
            raise RequestError(problem, remedy="finite weights, none below 0 and one above")
        # a power of two, by which floats are multiplied without rounding
        self.scale = 1.0 if weight is None else math.ldexp(1.0, _BITS - math.frexp(float(weight.max()))[1])
        self.expected = self.scale * (1.0 if weight is None else float(weight.double().mean()))  # units of a label

    @property
    def ignored(self) -> int:
        """The label that weighs nothing."""
        return int(self._criterion.ignore_index)

    def units(self, targets: Tensor) -> Tensor:
        """The weights () int64 of the labels (n, …) that count, in steps of `1 / scale`."""
        counted = targets != self._criterion.ignore_index
        steps = self._weigh_in_steps(targets.device)
        if steps is None:
            return torch.count_nonzero(counted)
        return torch.where(counted, steps[torch.where(counted, targets, 0)], 0).sum()

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss () of outputs (n, classes, …) and labels (n, …), times `scale`; 0 if no label counts."""
        criterion, steps = self._criterion, self._weigh_in_steps(outputs.device)
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))  # a sum in half precision is coarse
        weight = None if steps is None else steps.to(outputs.dtype)
        if isinstance(criterion, nn.NLLLoss):
            return nll_loss(outputs, targets, weight, ignore_index=criterion.ignore_index, reduction="sum")
        return cross_entropy(
            outputs,
            targets,
            weight,
            ignore_index=criterion.ignore_index,
            reduction="sum",
            label_smoothing=criterion.label_smoothing,
        )

    def _weigh_in_steps(self, device: torch.device) -> Tensor | None:
        """Return the weights (classes,) int64 in steps of `1 / scale`; None if all weigh 1."""
        weight = self._criterion.weight
        return None if weight is None else (weight.to(device).double() * self.scale).round().long()


def find_weighted_mean(criterion: Any, targets: object, labels: Tensor | None) -> WeightedMean | None:
    """Return the mean over a global batch; None if the mean over samples is the same, or for other criteria.

    Args:
        criterion: a subclass of torch's may compute anything, so it is another.
        targets: those of a micro-batch, (n, …); class numbers, since shares of classes weigh as much as samples.
        labels: those of the training split, if they are in memory; otherwise None.
    """
    if type(criterion) not in (nn.CrossEntropyLoss, nn.NLLLoss) or criterion.reduction != "mean":
        return None
    if not isinstance(targets, Tensor) or targets.is_floating_point():
        return None
    has_one_each = criterion.weight is None and targets.ndim == 1
    if has_one_each and labels is not None and not bool((labels == criterion.ignore_index).any()):
        return None
    return WeightedMean(criterion)
