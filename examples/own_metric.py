"""Two metrics of your own, exact on any number of workers.

python main_multi_gpu.py --metric own_metric:margin --metric own_metric:Kappa --best val_kappa:max
"""

import torch
from torch import Tensor


def margin(outputs: Tensor, targets: Tensor) -> Tensor:
    """One value for each sample, (n,): by how much the true class leads the best of the others. Shown is the mean."""
    own = outputs.gather(1, targets.unsqueeze(1))
    others = outputs.scatter(1, targets.unsqueeze(1), float("-inf")).max(1).values
    return own.squeeze(1) - others


class Kappa:
    """Cohen's kappa, which is no mean over samples: from sums over the split, here whole counts."""

    def __init__(self, num_classes: int) -> None:
        self.classes = num_classes

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.bincount(targets * self.classes + outputs.argmax(1), minlength=self.classes**2)

    def compute(self, sums: Tensor) -> Tensor:
        shares = sums.view(self.classes, self.classes).double() / sums.sum()
        by_chance = shares.sum(0) @ shares.sum(1)
        return (shares.trace() - by_chance) / (1 - by_chance)
