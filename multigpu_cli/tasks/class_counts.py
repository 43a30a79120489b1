"""Counts of predictions: what accuracy, precision, recall and F1 need. A NaN is no prediction, and makes them NaN."""

from math import nan

import torch
from torch import Tensor

LARGEST_TABLE = 256
"""Classes of which predictions are counted for each true class apart."""


def count_classes(outputs: Tensor, targets: Tensor, *, table: bool = False) -> Tensor:
    """(3, classes) int64 of a batch: correct predictions, all predictions, and samples of each class.

    Args:
        outputs: (n, classes) logits.
        targets: (n,) int64 class numbers.
        table: a confusion table comes below, (classes, classes): row = true class, column = predicted; none of more
            than LARGEST_TABLE classes.
    """
    classes, known = outputs.shape[1], ~outputs.isnan().any(1)
    predicted, true = outputs.argmax(1)[known], targets[known]
    counts = torch.stack(
        [torch.bincount(each, minlength=classes) for each in (true[predicted == true], predicted, targets)]
    )
    if not table or classes > LARGEST_TABLE:
        return counts
    confusion = torch.bincount(true * classes + predicted, minlength=classes**2)
    return torch.cat([counts, confusion.view(classes, classes)])


def count_right(right: Tensor, judged: Tensor) -> Tensor:
    """(2,) int64: how many are right, and how many of the numbers that were judged are NaN."""
    return torch.stack([right.sum(), judged.isnan().sum()])


def compute_accuracy(counts: Tensor, units: int) -> float:
    """The share that is right, from the sum of `count_right`."""
    return nan if int(counts[1]) else int(counts[0]) / units
