"""A network that computes its own loss: it gets inputs and targets, and what it returns holds the loss."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from multigpu_cli.config.schema import TaskConfig
from multigpu_cli.data.collate import Collate, get_sample
from multigpu_cli.data.data_source import DataSource
from multigpu_cli.data.loader import Batch
from multigpu_cli.runtime.model_call import IGNORED, TARGETS, Labelled
from multigpu_cli.runtime.preserve_module_state import loss_mode
from multigpu_cli.tasks.base import BatchMetrics, Task


class FromModel(Task):
    """The loss that the network returns, as a mean over the samples of the global batch, or over its labels.

    The network is called with inputs and targets, a dict goes to it as it is. Its loss is the mean over a micro-batch:
    over the labels that are not -100 where a sample has a row of whole numbers (tokens, a mask of classes), of which
    transformers' causal language models do not predict the first; else over samples. A micro-batch weighs as many, so
    the step's loss is the mean over the global batch on any number of workers.

    An evaluation calls it the same way in evaluation mode. A network that has no loss there (torchvision's detectors)
    is in training mode then, but for BatchNorm and dropout. The better result has the lower loss.

    Args:
        loss: name of the loss in what is returned, or its place in a tuple. Without it: a () tensor, `loss`, the only
            () tensor of a tuple, or the sum of a dict of () tensors.
    """

    expected_shapes = (
        "a loss () from the network: alone, as .loss, in a tuple, or a dict of losses (--set task.loss=NAME)"
    )

    def __init__(self, source: DataSource, config: TaskConfig, loss: str | int | None = None) -> None:
        super().__init__(source, config)
        self._name, self._loss_in_training, self._skips_first = loss, False, False
        inputs, targets = Collate(source.train, source.form)([(0, get_sample(source.train, 0))])
        if (labels := _find_labels(inputs, targets)) is not None:
            self.unit, self.units_per_sample = "token", max(1, labels.numel())

    def loss_sum(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        return self._sum(self._loss(model, batch, needed=True), batch)

    def units(self, batch: Batch) -> Tensor | int:
        labels = _find_labels(batch.inputs, batch.targets) if self.unit == "token" else None
        if labels is None:
            return len(batch)
        return torch.count_nonzero(labels[..., 1:] != IGNORED if self._skips_first else labels != IGNORED)

    def measure(self, model: nn.Module, batch: Batch) -> BatchMetrics:
        loss = None if self._loss_in_training else self._loss(model, batch, needed=False)
        if loss is None:
            self._loss_in_training = True
            with loss_mode(model):
                loss = self._loss(model, batch, needed=True)
        return BatchMetrics(self._sum(loss.double(), batch), torch.zeros(0, dtype=torch.int64, device=loss.device))

    def _loss(self, model: Callable[..., Any], batch: Batch, *, needed: bool) -> Any:
        """(): the mean over a micro-batch; None where nothing is one, and none is needed."""
        given = batch.inputs if batch.targets is None else Labelled(batch.inputs, batch.targets)
        outputs = model(given)
        self._skips_first = "CausalLM" in type(outputs).__name__
        loss = _find_loss(outputs) if self._name is None else _find_by_name(outputs, self._name)
        if loss is None and needed:
            raise ValueError(f"no loss{'' if self._name is None else f' {self._name!r}'} in what it returns")
        return loss

    def _sum(self, loss: Tensor, batch: Batch) -> Tensor:
        """Over units; the mean over none of them is no number."""
        wide, count = loss.to(torch.promote_types(loss.dtype, torch.float32)), self.units(batch)
        return wide * count if isinstance(count, int) else torch.where(count > 0, wide * count, 0.0)


def _find_labels(inputs: Any, targets: Any) -> Tensor | None:
    """(n, t, …) whole numbers, several for each sample; None where there are no such labels."""
    if targets is None and isinstance(inputs, Mapping):
        targets = next((inputs[name] for name in TARGETS if name in inputs), None)
    several = isinstance(targets, Tensor) and targets.dtype == torch.int64 and targets.ndim > 1
    return targets if several else None


def _find_loss(outputs: Any) -> Tensor | None:
    if _is_loss(outputs):
        return outputs  # type: ignore[no-any-return]
    if (named := _find_by_name(outputs, "loss")) is not None:
        return named
    if isinstance(outputs, Mapping):
        parts = list(outputs.values())
        return torch.stack(parts).sum() if parts and all(map(_is_loss, parts)) else None
    losses = [each for each in outputs if _is_loss(each)] if isinstance(outputs, tuple) else []
    return losses[0] if len(losses) == 1 else None


def _find_by_name(outputs: Any, name: str | int) -> Tensor | None:
    if isinstance(outputs, Mapping):
        found = outputs.get(name)
    elif isinstance(outputs, tuple) and isinstance(name, int):
        found = outputs[name] if -len(outputs) <= name < len(outputs) else None
    else:
        found = getattr(outputs, str(name), None)
    return found if _is_loss(found) else None


def _is_loss(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point()
