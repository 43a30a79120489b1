"""The built-in metrics, each exact: of whole counts, or of the whole split in one place."""

import torch
from torch import Tensor


class _Confusion:
    """Counts of (true class, predicted class); outputs (n, classes) logits, targets (n,) int64."""

    def __init__(self, num_classes: int) -> None:
        self.classes = num_classes

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """(classes²,) int64."""
        _check_logits(outputs, targets)
        return torch.bincount(targets * self.classes + outputs.argmax(1), minlength=self.classes**2)

    def _count(self, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(classes,) each, float64: correct predictions, all predictions, samples."""
        confusion = sums.view(self.classes, self.classes).double()
        return confusion.diagonal(), confusion.sum(0), confusion.sum(1)


class MacroAccuracy(_Confusion):
    """The mean over classes of the share of their samples that is right, which is balanced accuracy."""

    def compute(self, sums: Tensor) -> float:
        """Over the classes that have samples."""
        correct, _, support = self._count(sums)
        return float((correct / support)[support > 0].mean())


class MacroF1(_Confusion):
    """The mean over classes of F1, as scikit-learn's f1_score(average="macro")."""

    def compute(self, sums: Tensor) -> float:
        """Over the classes that have samples or predictions."""
        correct, predicted, support = self._count(sums)
        return float((2 * correct / (predicted + support))[predicted + support > 0].mean())


def compute_top5(outputs: Tensor, targets: Tensor) -> Tensor:
    """(n,) whether the true class is among the five likeliest."""
    _check_logits(outputs, targets)
    likeliest = outputs.topk(min(5, outputs.shape[1]), 1).indices
    return (likeliest == targets.unsqueeze(1)).any(1)


class _WholeSplit:
    """Keeps what it is given."""

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

    Outputs (n, 2) logits, targets (n,); ties count half (Mann and Whitney 1947). NaN if one class has no sample.
    """

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Keep a batch.

        Raises:
            ValueError: there are not two classes.
        """
        if outputs.ndim != 2 or outputs.shape[1] != 2 or targets.shape != outputs.shape[:1]:
            raise ValueError(f"outputs {tuple(outputs.shape)} for targets {tuple(targets.shape)}: two classes only")
        super().update((outputs[:, 1] - outputs[:, 0]), targets)

    def compute(self) -> float:
        """From the ranks of the scores, where equal scores share theirs."""
        scores, targets = self._read()
        _, place, counts = scores.unique(return_inverse=True, return_counts=True)
        ranks = (counts.cumsum(0) - (counts - 1) / 2)[place]
        positive = targets > 0.5
        hits, others = int(positive.sum()), int((~positive).sum())
        return float((ranks[positive].sum() - hits * (hits + 1) / 2) / (hits * others))


class R2(_WholeSplit):
    """The coefficient of determination; of several numbers in a target, their mean, as scikit-learn's r2_score."""

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Keep a batch.

        Raises:
            ValueError: outputs and targets differ in shape.
        """
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
