"""Classification: one class for each sample, by cross-entropy."""

from collections.abc import Callable
from math import nan
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from multigpu_cli.config.schema import TaskConfig
from multigpu_cli.data.class_weights import resolve_class_weights
from multigpu_cli.data.collate import describe_shapes, get_sample, to_pair
from multigpu_cli.data.data_source import DataSource
from multigpu_cli.data.loader import Batch
from multigpu_cli.errors import RequestError, pluralize
from multigpu_cli.tasks.base import BatchMetrics, Task, at_least_float32, per_class_rows
from multigpu_cli.tasks.class_counts import count_classes


class Classification(Task):
    """Targets (n,) int64 class numbers, model outputs (n, classes) logits; the better result has the higher accuracy.

    With task.class_weights the loss of a training sample is multiplied by the weight of its class, as by torch's
    CrossEntropyLoss(weight=…), and the mean is over samples. Evaluations weigh all samples the same.

    Raises:
        RequestError: the dataset has no classes, or labels that are not among them.
    """

    expected_shapes = "targets (n,) int64 class numbers; outputs (n, classes) logits"

    def __init__(self, source: DataSource, config: TaskConfig) -> None:
        super().__init__(source, config)
        if source.num_classes < 2:
            raise _too_few_classes(source)
        for name in ("train", "val", "test"):
            _check_labels(name, getattr(source, name), source)
        self._weights: Tensor | None = None

    def loss_sum(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        logits = at_least_float32(model(batch.inputs))
        weights = self._class_weights_for(logits)
        mixed = batch.targets.is_floating_point()  # shares of classes
        targets, smoothing = batch.targets.to(logits.dtype) if mixed else batch.targets, self.config.label_smoothing
        return cross_entropy(logits, targets, weights, reduction="sum", label_smoothing=smoothing)

    def _class_weights_for(self, logits: Tensor) -> Tensor | None:
        """(classes,) in the type of the logits; copied to their device once, for each copy would stall the stream."""
        if self.config.class_weights is None:
            return None
        if self._weights is None or self._weights.device != logits.device:
            weights = resolve_class_weights(self.config.class_weights, self.source, "task.class_weights")
            self._weights = weights.to(logits.device)
        return self._weights.to(logits.dtype)

    def measure(self, model: nn.Module, batch: Batch) -> BatchMetrics:
        logits, classes = model(batch.inputs).double(), self.source.num_classes
        if logits.shape != (len(batch), classes):
            raise ValueError(f"outputs {tuple(logits.shape)} for {len(batch)} samples of {classes} classes")
        loss = cross_entropy(logits, batch.targets, reduction="sum")  # first: it refuses wrong targets by name
        return BatchMetrics(loss, count_classes(logits, batch.targets, table=True).flatten())

    def predictions(self, model: nn.Module, batch: Batch) -> dict[str, list[Any]]:
        probability, predicted = model(batch.inputs).double().softmax(1).max(1)
        names = self.class_names(self.source.num_classes)
        return {
            "target": [names[number] for number in batch.targets.tolist()],
            "prediction": [names[number] for number in predicted.tolist()],
            "probability": probability.tolist(),
        }

    def metrics(self, counts: Tensor, units: int) -> dict[str, float]:
        correct, predicted, samples = self._rows(counts)[:3].sum(1).tolist()
        return {"accuracy": correct / units if predicted == samples else nan}

    def score(self, metrics: dict[str, float]) -> tuple[float, ...]:
        return (metrics["accuracy"], -metrics["loss"])

    def details(self, counts: Tensor) -> dict[str, Any]:
        rows = self._rows(counts)
        found = {"per_class": per_class_rows(self.class_names(self.source.num_classes), rows[:3].T.tolist())}
        return found | ({"confusion": rows[3:].tolist()} if len(rows) > 3 else {})

    def _rows(self, counts: Tensor) -> Tensor:
        """(k, classes): what `count_classes` gave."""
        return counts.view(-1, self.source.num_classes)


def _too_few_classes(source: DataSource) -> RequestError:
    """The error for a dataset with one class, or with none: then its targets are no class numbers."""
    problem = f"--task classification: the dataset has {pluralize(source.num_classes, 'class')}"
    if source.num_classes:
        return RequestError(problem, remedy="another --task")
    target = to_pair(get_sample(source.train, 0), "sample 0", source.form)[1]
    return RequestError(
        f"{problem}: the target of sample 0 is {describe_shapes(target)}",
        remedy="the class number of each sample as its target, a whole number () from 0 on; or another --task",
    )


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
