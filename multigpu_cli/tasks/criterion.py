"""A user's own loss: a callable of outputs and targets that returns their mean."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from multigpu_cli.config.schema import TaskConfig
from multigpu_cli.data.loader import Batch
from multigpu_cli.data.source import DataSource
from multigpu_cli.distributed.world import is_out_of_memory
from multigpu_cli.errors import RequestError
from multigpu_cli.tasks.base import BatchMetrics, Loss, Task, at_least_float32
from multigpu_cli.tasks.classification import compute_accuracy, count_right


class Criterion(Task):
    """The loss `criterion(outputs, targets)`, as a mean over the samples of the global batch.

    A criterion that returns () counts as the mean over its micro-batch, each of whose samples weighs the same; one that
    returns (n, …) as the losses of the samples. Micro-batches are the same on any number of workers, so also a weighted
    mean (class weights, ignored targets) does not depend on their number. Outputs (n, classes) with targets (n,) int64
    give an accuracy, too; the better result has the higher one, or else the lower loss.

    Outputs come as the network returns them: a tensor, a tuple, a dict, an object. Of a network of transformers the
    criterion gets the logits, if it takes them, else the whole output object.

    Args:
        has_logits: the network is one of transformers.

    Raises:
        RequestError: the criterion sums over the batch, or has parameters of its own.
    """

    expected_shapes = "what the criterion takes"

    def __init__(self, source: DataSource, config: TaskConfig, criterion: Loss, *, has_logits: bool = False) -> None:
        super().__init__(source, config)
        if getattr(criterion, "reduction", "mean") == "sum":
            raise RequestError(
                "criterion: reduction='sum' grows with the batch, and a step here is a mean over its global batch",
                remedy="reduction='mean'",
            )
        if isinstance(criterion, nn.Module) and any(p.requires_grad for p in criterion.parameters()):
            raise RequestError(
                "criterion: it has parameters of its own, which would not be trained", remedy="put them into the model"
            )
        self.criterion = criterion
        self._has_logits = has_logits
        self._of_logits: bool | None = isinstance(criterion, nn.modules.loss._Loss) or None  # None: to be tried

    def loss_sum(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        return self._sum(model(batch.inputs), batch)

    def measure(self, model: nn.Module, batch: Batch) -> BatchMetrics:
        outputs = model(batch.inputs)
        return BatchMetrics(self._sum(outputs, batch).double(), _right(self._logits(outputs), batch.targets))

    def pair_with_targets(self, outputs: Any, batch: Batch) -> tuple[Any, Any]:
        return super().pair_with_targets(self._logits(outputs), batch)

    def metrics(self, counts: Tensor, units: int) -> dict[str, float]:
        return {"accuracy": compute_accuracy(counts, units)} if counts.numel() else {}

    def score(self, metrics: dict[str, float]) -> tuple[float, ...]:
        return (metrics["accuracy"], -metrics["loss"]) if "accuracy" in metrics else (-metrics["loss"],)

    def _sum(self, outputs: Any, batch: Batch) -> Tensor:
        if isinstance(self.criterion, nn.Module) and isinstance(batch.targets, Tensor):
            self.criterion.to(batch.targets.device)
        loss: Any = self.criterion(self._choose(outputs, batch.targets), batch.targets)
        if not isinstance(loss, Tensor):
            raise TypeError(f"the criterion returned a {type(loss).__name__}, not a tensor")
        wide = at_least_float32(loss)
        if wide.ndim == 0:
            return wide * len(batch)
        return wide.sum() if wide.ndim == 1 else wide.flatten(1).mean(1).sum()

    def _logits(self, outputs: Any) -> Any:
        return outputs.logits if self._has_logits else outputs

    def _choose(self, outputs: Any, targets: Any) -> Any:
        """Logits or the whole output object, as the first batch has shown."""
        if self._has_logits and self._of_logits is None:
            try:
                self.criterion(outputs.logits, targets)
                self._of_logits = True
            except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
                if is_out_of_memory(error):
                    raise
                self._of_logits = False
        return self._logits(outputs) if self._of_logits else outputs


def _right(outputs: Any, targets: Any) -> Tensor:
    """See `count_right`; (0,) where there are no classes."""
    both = isinstance(outputs, Tensor) and isinstance(targets, Tensor)
    if not both or outputs.ndim != 2 or outputs.shape[1] < 2 or targets.ndim != 1 or targets.is_floating_point():
        return torch.zeros(0, dtype=torch.int64, device=getattr(outputs, "device", None))
    return count_right(outputs.argmax(1) == targets, outputs)
