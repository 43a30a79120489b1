"""Labelled samples: a class for each sample or pixel, several classes by their own yes or no, or numbers."""

from collections.abc import Callable, Iterable, Mapping
from math import isnan, nan
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, huber_loss, l1_loss, mse_loss
from torch.utils.data import TensorDataset

from multigpu_cli.config.schema import TaskConfig
from multigpu_cli.config.types import choice
from multigpu_cli.data.class_weights import resolve_class_weights
from multigpu_cli.data.collate import VOID, Collate, describe_shapes, get_sample, to_pair
from multigpu_cli.data.loader import Batch
from multigpu_cli.data.source import DataSource
from multigpu_cli.errors import RequestError, pluralize
from multigpu_cli.monitor.meters import divide
from multigpu_cli.runtime.model_call import IGNORED
from multigpu_cli.runtime.precision import at_least_float32
from multigpu_cli.tasks.base import BatchMetrics, Task


class Classification(Task):
    """Targets (n,) int64 class numbers, model outputs (n, classes) logits; the better result has the higher accuracy.

    With task.class_weights the loss of a training sample is multiplied by the weight of its class, as by torch's
    CrossEntropyLoss(weight=…), and the mean is over samples. Evaluations weigh all samples the same.
    """

    expected_shapes = "targets (n,) int64 class numbers; outputs (n, classes) logits"

    def __init__(self, source: DataSource, config: TaskConfig) -> None:
        super().__init__(source, config)
        if source.num_classes < 2:
            raise self._too_few_classes("classification")
        for name in ("train", "val", "test"):
            _check_labels(name, getattr(source, name), source)
        self._weights: Tensor | None = None

    def loss_sum(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        logits = at_least_float32(model(batch.inputs))
        weights = self._class_weights_for(logits)
        mixed = check_rows(batch).is_floating_point()  # shares of classes
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
        if logits.shape != (len(check_rows(batch)), classes):
            raise ValueError(f"outputs {tuple(logits.shape)} for {len(batch)} samples of {classes} classes")
        loss = cross_entropy(logits, batch.targets, reduction="sum")  # first: it refuses wrong targets by name
        return BatchMetrics(loss, count_classes(logits, batch.targets, table=True).flatten())

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """(n, classes) probabilities."""
        return at_least_float32(model(batch.inputs)).softmax(1)

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
        found = {"per_class": _make_class_rows(self.class_names(self.source.num_classes), rows[:3].T.tolist())}
        return found | ({"confusion": rows[3:].tolist()} if len(rows) > 3 else {})

    def _too_few_classes(self, task: str) -> RequestError:
        """The error for a dataset with one class, or with none: then its targets are no class numbers."""
        problem = f"--task {task}: the dataset has {pluralize(self.source.num_classes, 'class')}"
        if self.source.num_classes:
            return RequestError(problem, remedy="another --task")
        target = to_pair(get_sample(self.source.train, 0), "sample 0", self.source.form)[1]
        usual = "the class number of each sample as its target, a whole number () from 0 on; or another --task"
        remedy = self.suggest_task(target) or usual
        return RequestError(f"{problem}: the target of sample 0 is {describe_shapes(target)}", remedy=remedy)

    def suggest_task(self, target: Any) -> str:
        if not isinstance(target, Tensor):
            own = "--task my_code:Task, a class of your own; or --task from-model, if the model returns its loss"
            return own if isinstance(target, Mapping | tuple | list) else ""
        if target.ndim > 1 and not target.is_floating_point():
            return "--task segmentation, for a class of each pixel"
        if target.numel() > 1 and bool(((target == 0) | (target == 1)).all()):
            return "--task multi-label, for labels of 0 and 1"
        return "--task regression, for numbers" if target.is_floating_point() else ""

    def _rows(self, counts: Tensor) -> Tensor:
        """(k, classes): what `count_classes` gave."""
        return counts.view(-1, self.source.num_classes)


def _check_labels(name: str, split: Any, source: DataSource) -> None:
    if not isinstance(split, TensorDataset):
        return  # a map-style dataset is not read a second time for a look at its labels
    labels, classes = to_pair(split.tensors, name, source.form)[1], source.num_classes
    if labels.dtype != torch.int64 or labels.ndim != 1:
        raise RequestError(
            f"--data: {name} targets must be (n,) int64 class numbers, not {tuple(labels.shape)} {labels.dtype}"
        )
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        problem = f"--data: {name} labels range from {int(labels.min())} to {int(labels.max())} with {classes} classes"
        raise RequestError(problem, remedy="labels must be 0 … classes-1")


class Segmentation(Classification):
    """Targets (n, …) a class number for each pixel, model outputs (n, classes, …); the better has the higher mIoU.

    The loss is the mean over the pixels that count. Targets may also be (n, 1, …), and outputs the entry `out` of a
    dict, as torchvision's networks return them. An evaluation gives `accuracy` over pixels, and `miou`: intersection ÷
    union of each class, as the mean over the classes that are in targets or predictions.

    Args:
        ignore_index: the class of pixels that do not count; nor do those of -100.
    """

    unit = "pixel"
    expected_shapes = (
        "targets (n, height, width) class numbers, 255 or --set task.ignore_index=N where none counts; outputs "
        "(n, classes, height, width) logits, alone or as ['out']"
    )

    def __init__(self, source: DataSource, config: TaskConfig, ignore_index: int = VOID) -> None:
        Task.__init__(self, source, config)
        if source.num_classes < 2:
            raise self._too_few_classes("segmentation")
        self._ignored, self._weights = ignore_index, None
        targets = Collate(source.train, source.form)([(0, get_sample(source.train, 0))]).targets
        self.units_per_sample = max(1, getattr(targets, "numel", lambda: 1)())

    def units(self, batch: Batch) -> Tensor:
        classes = batch.targets.long()  # -100 and the class 156 are one number in 8 bits
        return torch.count_nonzero((classes != self._ignored) & (classes != IGNORED))

    def loss_sum(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        logits, targets = self._by_pixel(model(batch.inputs), batch.targets)
        weights, smoothing = self._class_weights_for(logits), self.config.label_smoothing
        return cross_entropy(logits, targets, weights, reduction="sum", label_smoothing=smoothing)

    def measure(self, model: nn.Module, batch: Batch) -> BatchMetrics:
        logits, targets = self._by_pixel(model(batch.inputs), batch.targets)
        counted = targets != IGNORED
        logits, targets = logits[counted], targets[counted]
        if wrong := targets[(targets < 0) | (targets >= self.source.num_classes)].tolist():  # a GPU only asserts
            raise ValueError(f"a pixel of class {wrong[0]}, and there are {self.source.num_classes} classes")
        loss = cross_entropy(logits, targets, reduction="none").double().sum()
        return BatchMetrics(loss, count_classes(logits, targets, table=True).flatten())

    def metrics(self, counts: Tensor, units: int) -> dict[str, float]:
        correct, predicted, true = self._rows(counts)[:3].double()
        union = predicted + true - correct
        return super().metrics(counts, units) | {"miou": float((correct / union)[union > 0].mean())}

    def score(self, metrics: dict[str, float]) -> tuple[float, ...]:
        return (metrics["miou"], -metrics["loss"])

    def pair_with_targets(self, outputs: Any, batch: Batch) -> tuple[Any, Any]:
        return super().pair_with_targets(_choose_logits(outputs), batch)

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """(n, …) the likeliest class of each pixel."""
        classes: Tensor = _choose_logits(model(batch.inputs)).argmax(1)
        return classes

    predictions, suggest_task = Task.predictions, Task.suggest_task

    def _by_pixel(self, outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return (pixels, classes) logits and (pixels,) classes, IGNORED if excluded; 1-d losses are deterministic."""
        logits, classes = _choose_logits(outputs), self.source.num_classes
        targets = targets.squeeze(1) if targets.ndim == logits.ndim else targets
        if targets.is_floating_point() or logits.shape != (len(targets), classes, *targets.shape[1:]):
            raise ValueError(f"outputs {tuple(logits.shape)} for targets {describe_shapes(targets)}, {classes} classes")
        targets = targets.flatten().long()
        logits = at_least_float32(logits).movedim(1, -1).flatten(0, -2)
        return logits, targets.masked_fill(targets == self._ignored, IGNORED)


def _choose_logits(outputs: Any) -> Any:
    return outputs["out"] if isinstance(outputs, Mapping) and "out" in outputs else outputs


class MultiLabel(Task):
    """Targets (n, k) of 0 and 1, model outputs (n, k) logits; the better result has the higher F1 over all labels.

    The loss of a sample is the mean over its labels. `accuracy` is the share of samples with every label right.
    """

    expected_shapes = "targets (n, labels) of 0 and 1; outputs (n, labels) logits"

    def loss_sum(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        logits, targets = _match_shapes(model(batch.inputs), batch)
        targets = targets * (1 - self.config.label_smoothing) + self.config.label_smoothing / 2
        return binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(1).sum()

    def measure(self, model: nn.Module, batch: Batch) -> BatchMetrics:
        logits, targets = _match_shapes(model(batch.inputs), batch)
        loss = binary_cross_entropy_with_logits(logits.double(), targets.double(), reduction="none").mean(1).sum()
        predicted, true = logits > 0, targets > 0.5
        counts = [(predicted & true).sum(0), (predicted & ~true).sum(0), (~predicted & true).sum(0)]
        return BatchMetrics(loss, torch.cat([*counts, count_right((predicted == true).all(1), logits)]))

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """(n, labels) probabilities."""
        return at_least_float32(model(batch.inputs)).sigmoid()

    def predictions(self, model: nn.Module, batch: Batch) -> dict[str, list[Any]]:
        logits, targets = _match_shapes(model(batch.inputs), batch)
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
        return {"per_class": _make_class_rows(self.class_names(len(rows)), table)}


def _match_shapes(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    targets = check_rows(batch)
    if logits.shape != targets.shape or logits.ndim != 2:
        raise ValueError(f"outputs {tuple(logits.shape)} for targets {tuple(targets.shape)}")
    logits = at_least_float32(logits)
    return logits, targets.to(logits.dtype)


LARGEST_TABLE = 256  # classes of which predictions are counted for each true class apart


def count_classes(outputs: Tensor, targets: Tensor, *, table: bool = False) -> Tensor:
    """(3, classes) int64 of a batch: correct predictions, all predictions, and samples of each class.

    With `table` a confusion table comes below, (classes, classes): row = true class, column = predicted; none of more
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


def check_rows(batch: Batch, rows: int | None = None) -> Any:
    """Return the targets, (n, …); raise RequestError unless each sample has a row of them.

    A sum over other rows, those of a collate_fn that drops samples, say, has no mean over samples.

    Args:
        rows: the number of rows, if it is not that of the targets.
    """
    rows = batch.targets.shape[0] if rows is None else rows
    if rows == batch.sample_indices.shape[0]:  # len(batch) calls seven functions, in each step
        return batch.targets
    raise RequestError(
        f"--data: collate_fn returned {pluralize(rows, 'target')} for {pluralize(len(batch), 'sample')}",
        remedy="leave samples that can't be read out of the dataset, and return a row for each of the others",
    )


def count_right(right: Tensor, judged: Tensor) -> Tensor:
    """(2,) int64: how many are right, and how many of the numbers that were judged are NaN."""
    return torch.stack([right.sum(), judged.isnan().sum()])


def compute_accuracy(counts: Tensor, units: int) -> float:
    """The share that is right, from the sum of `count_right`."""
    return nan if int(counts[1]) else int(counts[0]) / units


_LOSSES: dict[str, Callable[..., Tensor]] = {"squared": mse_loss, "absolute": l1_loss, "huber": huber_loss}


class Regression(Task):
    """Targets (n,) or (n, k) floats, model outputs the same, or (n, 1) for (n,); the better result has the lower loss.

    The loss of a sample is the mean over its k numbers, as in torch's own losses: squared, absolute or huber (Huber
    1964, with its edge at 1). An evaluation also gives `mae`, the mean absolute error, and `rmse`, the root of the mean
    squared one. Where the dataset says how its targets spread, the model learns them standardised, and the loss is of
    those; mae and rmse are in the targets' own unit.
    """

    sums = ("absolute", "squared")
    expected_shapes = "targets (n,) or (n, k) numbers; outputs of the same shape, or (n, 1) for (n,)"

    def __init__(
        self, source: DataSource, config: TaskConfig, loss: Annotated[str, choice(*_LOSSES)] = "squared"
    ) -> None:
        super().__init__(source, config)
        self._loss = _LOSSES[loss]
        self.mean, self.deviation = source.target_scale or (0.0, 1.0)

    def loss_sum(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        outputs, targets = self._match_shapes(model(batch.inputs), batch)
        return _by_sample(self._loss(outputs, targets, reduction="none")).sum()

    def measure(self, model: nn.Module, batch: Batch) -> BatchMetrics:
        outputs, targets = (value.double() for value in self._match_shapes(model(batch.inputs), batch))
        error = (outputs - targets) * self.deviation
        loss = _by_sample(self._loss(outputs, targets, reduction="none"))
        sums = torch.stack([_by_sample(error.abs()).sum(), _by_sample(error.square()).sum()])
        return BatchMetrics(loss.sum(), torch.zeros(1, dtype=torch.int64, device=error.device), sums)

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """In the targets' own unit."""
        return self.pair_with_targets(model(batch.inputs), batch)[0]

    def pair_with_targets(self, outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Both in the targets' own unit."""
        outputs, _ = self._match_shapes(outputs, batch)
        return outputs.double() * self.deviation + self.mean, batch.targets.double()

    def figures(self, means: dict[str, float]) -> dict[str, float]:
        return {"mae": means["absolute"], "rmse": means["squared"] ** 0.5}

    def _match_shapes(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Both as (n,) or (n, k) of at least 32 bits; broadcasting would compare every output with every target."""
        targets = check_rows(batch)
        if targets.ndim == 1 and outputs.shape == (len(targets), 1):
            outputs = outputs.squeeze(1)
        if outputs.shape != targets.shape:
            raise ValueError(f"outputs {tuple(outputs.shape)} for targets {tuple(targets.shape)}")
        outputs = at_least_float32(outputs)
        return outputs, (targets.to(outputs.dtype) - self.mean) / self.deviation


def _by_sample(errors: Tensor) -> Tensor:
    return errors.flatten(1).mean(1) if errors.ndim > 1 else errors


def _make_class_rows(names: Iterable[str], counts: Iterable[tuple[int, int, int]]) -> list[dict[str, Any]]:
    """A row for each class in the final report; counts are its correct predictions, all of them, and its samples."""
    return [
        {
            "class": name,
            "precision": divide(correct, predicted),
            "recall": divide(correct, support),
            "f1": divide(2 * correct, predicted + support),
            "support": support,
        }
        for name, (correct, predicted, support) in zip(names, counts, strict=True)
    ]
