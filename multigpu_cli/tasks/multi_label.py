"""Multi-label classification: any number of labels for each sample, by binary cross-entropy."""

from collections.abc import Callable
from math import isnan, nan
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from multigpu_cli.data.loader import Batch
from multigpu_cli.tasks.base import BatchMetrics, Task, at_least_float32, divide, per_class_rows
from multigpu_cli.tasks.class_counts import compute_accuracy, count_right


class MultiLabel(Task):
    """Targets (n, k) of 0 and 1, model outputs (n, k) logits; the better result has the higher F1 over all labels.

    The loss of a sample is the mean over its labels. `accuracy` is the share of samples with every label right.
    """

    expected_shapes = "targets (n, labels) of 0 and 1; outputs (n, labels) logits"

    def loss_sum(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        logits, targets = _match_shapes(model(batch.inputs), batch.targets)
        targets = targets * (1 - self.config.label_smoothing) + self.config.label_smoothing / 2
        return binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(1).sum()

    def measure(self, model: nn.Module, batch: Batch) -> BatchMetrics:
        logits, targets = _match_shapes(model(batch.inputs), batch.targets)
        loss = binary_cross_entropy_with_logits(logits.double(), targets.double(), reduction="none").mean(1).sum()
        predicted, true = logits > 0, targets > 0.5
        counts = [(predicted & true).sum(0), (predicted & ~true).sum(0), (~predicted & true).sum(0)]
        return BatchMetrics(loss, torch.cat([*counts, count_right((predicted == true).all(1), logits)]))

    def predictions(self, model: nn.Module, batch: Batch) -> dict[str, list[Any]]:
        logits, targets = _match_shapes(model(batch.inputs), batch.targets)
        names = self.class_names(logits.shape[1])
        truth = {f"target {name}": column.int().tolist() for name, column in zip(names, targets.T, strict=True)}
        probabilities = logits.double().sigmoid().T
        return truth | {
            f"probability {name}": column.tolist() for name, column in zip(names, probabilities, strict=True)
        }

    def metrics(self, counts: Tensor, units: int) -> dict[str, float]:
        hit, wrong, missed = (int(row.sum()) for row in counts[:-2].view(3, -1))
        accuracy = compute_accuracy(counts[-2:], units)
        return {"accuracy": accuracy, "f1": nan if isnan(accuracy) else divide(2 * hit, 2 * hit + wrong + missed)}

    def score(self, metrics: dict[str, float]) -> tuple[float, ...]:
        return (metrics["f1"], -metrics["loss"])

    def details(self, counts: Tensor) -> dict[str, Any]:
        rows = counts[:-2].view(3, -1).T.tolist()
        table = [(hit, hit + wrong, hit + missed) for hit, wrong, missed in rows]
        return {"per_class": per_class_rows(self.class_names(len(rows)), table)}


def _match_shapes(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    if logits.shape != targets.shape or logits.ndim != 2:
        raise ValueError(f"outputs {tuple(logits.shape)} for targets {tuple(targets.shape)}")
    logits = at_least_float32(logits)
    return logits, targets.to(logits.dtype)
