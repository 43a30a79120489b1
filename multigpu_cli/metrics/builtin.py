"""The built-in metrics, each exact: of whole counts, or of the whole split in one place."""

from abc import ABC, abstractmethod
from math import nan

import torch
from torch import Tensor

from multigpu_cli.tasks.supervised import count_classes


class _MacroMean(ABC):
    """Of counts for each class; outputs (n, classes) logits, targets (n,) int64. NaN if an output is."""

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """(3 · classes,) int64."""
        _check_logits(outputs, targets)
        return count_classes(outputs, targets).flatten()

    def compute(self, sums: Tensor) -> float:
        """The mean over the classes that have a value."""
        correct, predicted, support = sums.view(3, -1).double()
        values = self._by_class(correct, predicted, support)
        return float(values[~values.isnan()].mean()) if predicted.sum() == support.sum() else nan

    @abstractmethod
    def _by_class(self, correct: Tensor, predicted: Tensor, support: Tensor) -> Tensor:
        """(classes,) float64, NaN without a value; from correct predictions, all predictions and samples."""


class MacroAccuracy(_MacroMean):
    """The mean over classes of the share of their samples that is right, which is balanced accuracy."""

    def _by_class(self, correct: Tensor, predicted: Tensor, support: Tensor) -> Tensor:
        return correct / support


class MacroF1(_MacroMean):
    """The mean over classes of F1, as scikit-learn's f1_score(average="macro")."""

    def _by_class(self, correct: Tensor, predicted: Tensor, support: Tensor) -> Tensor:
        return 2 * correct / (predicted + support)


def compute_top5(outputs: Tensor, targets: Tensor) -> Tensor:
    """(n,) float64: 1 where the true class is among the five likeliest, else 0; NaN where an output is."""
    _check_logits(outputs, targets)
    likeliest = outputs.topk(min(5, outputs.shape[1]), 1).indices
    found = (likeliest == targets.unsqueeze(1)).any(1).double()
    return found.masked_fill(outputs.isnan().any(1), nan)


class _WholeSplit:
    """Keeps the outputs and targets of a whole split, for a number that is no sum over batches."""

    def __init__(self) -> None:
        self._outputs: list[Tensor] = []
        self._targets: list[Tensor] = []

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Keep a batch."""
        self._outputs.append(outputs.double())
        self._targets.append(targets.double())

    def _read(self) -> tuple[Tensor, Tensor]:
        return torch.cat(self._outputs), torch.cat(self._targets)


class AUROC(_WholeSplit):
    """The area under the ROC curve of two classes: how often a sample of class 1 scores above one of class 0.

    Outputs (n, 2) logits, targets (n,); ties count half (Mann and Whitney 1947). NaN if one class has no sample, or if
    an output is.
    """

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Keep a batch; ValueError where there are not two classes."""
        if outputs.ndim != 2 or outputs.shape[1] != 2 or targets.shape != outputs.shape[:1]:
            raise ValueError(f"outputs {tuple(outputs.shape)} for targets {tuple(targets.shape)}: two classes only")
        super().update(outputs[:, 1].double() - outputs[:, 0].double(), targets)

    def compute(self) -> float:
        """From the ranks of the scores, where equal scores share theirs: doubled, so that they are whole numbers."""
        scores, targets = self._read()
        positive = targets == 1
        hits, others = int(positive.sum()), int((~positive).sum())
        if not hits or not others or scores.isnan().any():
            return nan
        _, place, counts = scores.unique(return_inverse=True, return_counts=True)
        doubled = (2 * counts.cumsum(0) - counts + 1)[place]
        return (int(doubled[positive].sum()) - hits * (hits + 1)) / (2 * hits * others)


class R2(_WholeSplit):
    """The coefficient of determination; of several numbers in a target, their mean, as scikit-learn's r2_score."""

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Keep a batch; ValueError where outputs and targets differ in shape."""
        if outputs.shape != targets.shape or not targets.is_floating_point():
            raise ValueError(f"outputs {tuple(outputs.shape)} for targets {tuple(targets.shape)}: numbers of one shape")
        super().update(outputs.flatten(1) if outputs.ndim > 1 else outputs.unsqueeze(1), targets.view(len(targets), -1))

    def compute(self) -> float:
        """NaN where all targets are the same."""
        outputs, targets = self._read()
        spread = (targets - targets.mean(0)).square().sum(0)
        return float((1 - (outputs - targets).square().sum(0) / spread).mean())


def _check_logits(outputs: Tensor, targets: Tensor) -> None:
    if outputs.ndim != 2 or targets.shape != outputs.shape[:1] or targets.is_floating_point():
        raise ValueError(
            f"outputs {tuple(outputs.shape)} for targets {tuple(targets.shape)}: (n, classes) and (n,) class numbers"
        )
