"""Classification: one class for each sample, by cross-entropy."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from multigpu_cli.config.schema import TaskConfig
from multigpu_cli.data.collate import to_pair
from multigpu_cli.data.data_source import DataSource
from multigpu_cli.data.loader import Batch
from multigpu_cli.errors import RequestError, pluralize
from multigpu_cli.tasks.base import BatchMetrics, Task, at_least_float32, per_class_rows


class Classification(Task):
    """Targets (n,) int64 class numbers, model outputs (n, classes) logits; the better result has the higher accuracy.

    Raises:
        RequestError: the dataset has no classes, or labels that are not among them.
    """

    expected_shapes = "targets (n,) int64 class numbers; outputs (n, classes) logits"

    def __init__(self, source: DataSource, config: TaskConfig) -> None:
        super().__init__(source, config)
        if source.num_classes < 2:
            raise RequestError(
                f"--task classification: the dataset has {pluralize(source.num_classes, 'class')}",
                remedy="another --task",
            )
        for name in ("train", "val", "test"):
            _check_labels(name, getattr(source, name), source)

    def loss_sum(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        logits = at_least_float32(model(batch.inputs))
        return cross_entropy(logits, batch.targets, reduction="sum", label_smoothing=self.config.label_smoothing)

    def measure(self, model: nn.Module, batch: Batch) -> BatchMetrics:
        logits, classes = model(batch.inputs).double(), self.source.num_classes
        if logits.shape != (len(batch), classes):
            raise ValueError(f"outputs {tuple(logits.shape)} for {len(batch)} samples of {classes} classes")
        pairs = batch.targets * classes + logits.argmax(1)
        return BatchMetrics(
            cross_entropy(logits, batch.targets, reduction="sum"), torch.bincount(pairs, minlength=classes * classes)
        )

    def predictions(self, model: nn.Module, batch: Batch) -> dict[str, list[Any]]:
        probability, predicted = model(batch.inputs).double().softmax(1).max(1)
        names = self.class_names(self.source.num_classes)
        return {
            "target": [names[number] for number in batch.targets.tolist()],
            "prediction": [names[number] for number in predicted.tolist()],
            "probability": probability.tolist(),
        }

    def metrics(self, counts: Tensor, units: int) -> dict[str, float]:
        return {"accuracy": int(self._confusion(counts).trace()) / units}

    def score(self, metrics: dict[str, float]) -> tuple[float, ...]:
        return (metrics["accuracy"], -metrics["loss"])

    def details(self, counts: Tensor) -> dict[str, Any]:
        confusion = self._confusion(counts)
        table = torch.stack([confusion.diagonal(), confusion.sum(0), confusion.sum(1)], 1).tolist()
        return {
            "per_class": per_class_rows(self.class_names(self.source.num_classes), table),
            "confusion": confusion.tolist(),
        }

    def _confusion(self, counts: Tensor) -> Tensor:
        """(classes, classes) int64: row = true class, column = predicted."""
        return counts.view(self.source.num_classes, -1)


def _check_labels(name: str, split: Any, source: DataSource) -> None:
    if not isinstance(split, TensorDataset):
        return  # a map-style dataset is not read a second time for a look at its labels
    labels, classes = to_pair(split.tensors, name, source.form)[1], source.num_classes
    if labels.dtype != torch.int64 or labels.ndim != 1:
        raise RequestError(
            f"--data: {name} targets must be (n,) int64 class numbers, not {tuple(labels.shape)} {labels.dtype}"
        )
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise RequestError(
            f"--data: {name} labels range from {int(labels.min())} to {int(labels.max())} with {classes} classes",
            remedy="labels must be 0 … classes-1",
        )
