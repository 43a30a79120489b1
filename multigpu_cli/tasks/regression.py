"""Regression of numbers by squared error, absolute error or Huber loss."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import huber_loss, l1_loss, mse_loss

from multigpu_cli.config.schema import TaskConfig
from multigpu_cli.data.loader import Batch
from multigpu_cli.data.source import DataSource
from multigpu_cli.errors import RequestError, did_you_mean
from multigpu_cli.tasks.base import BatchMetrics, Task, at_least_float32

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

    def __init__(self, source: DataSource, config: TaskConfig, loss: str = "squared") -> None:
        super().__init__(source, config)
        if loss not in _LOSSES:
            raise RequestError(f"task.args.loss: {loss!r}", remedy=did_you_mean(str(loss), _LOSSES))
        self._loss = _LOSSES[loss]
        self.mean, self.deviation = source.target_scale or (0.0, 1.0)

    def loss_sum(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        outputs, targets = self._match_shapes(model(batch.inputs), batch.targets)
        return _by_sample(self._loss(outputs, targets, reduction="none")).sum()

    def measure(self, model: nn.Module, batch: Batch) -> BatchMetrics:
        outputs, targets = (value.double() for value in self._match_shapes(model(batch.inputs), batch.targets))
        error = (outputs - targets) * self.deviation
        loss = _by_sample(self._loss(outputs, targets, reduction="none"))
        sums = torch.stack([_by_sample(error.abs()).sum(), _by_sample(error.square()).sum()])
        return BatchMetrics(loss.sum(), torch.zeros(1, dtype=torch.int64, device=error.device), sums)

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """In the targets' own unit."""
        return self.pair_with_targets(model(batch.inputs), batch)[0]

    def pair_with_targets(self, outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Both in the targets' own unit."""
        outputs, _ = self._match_shapes(outputs, batch.targets)
        return outputs.double() * self.deviation + self.mean, batch.targets.double()

    def figures(self, means: dict[str, float]) -> dict[str, float]:
        return {"mae": means["absolute"], "rmse": means["squared"] ** 0.5}

    def _match_shapes(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Both as (n,) or (n, k) of at least 32 bits; broadcasting would compare every output with every target."""
        if targets.ndim == 1 and outputs.shape == (len(targets), 1):
            outputs = outputs.squeeze(1)
        if outputs.shape != targets.shape:
            raise ValueError(f"outputs {tuple(outputs.shape)} for targets {tuple(targets.shape)}")
        outputs = at_least_float32(outputs)
        return outputs, (targets.to(outputs.dtype) - self.mean) / self.deviation


def _by_sample(errors: Tensor) -> Tensor:
    return errors.flatten(1).mean(1) if errors.ndim > 1 else errors
