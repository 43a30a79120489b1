"""Follows an evaluation for the metrics beside the task's own; does nothing where there are none."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from multigpu_cli.errors import RequestError, TrainingError
from multigpu_cli.runtime.tensor_versions import TensorVersions
from multigpu_cli.runtime.world import World
from multigpu_cli.tasks.metrics.base import Metric, Moved


class MetricMeter:
    """Takes the model's outputs out of the task's own pass over each batch, so that none is computed twice.

    Args:
        metrics: they are begun.
        batches: of the evaluation, over all workers.
    """

    def __init__(self, metrics: Sequence[Metric], batches: int, world: World) -> None:
        self._metrics, self._outputs = metrics, list[Any]()
        for metric in metrics:
            metric.begin(batches, world)

    @contextmanager
    def record(self, model: nn.Module) -> Iterator[None]:
        """Note what the model returns inside: to the task, so of a network of transformers its logits."""
        if not self._metrics:
            yield
            return
        self._outputs = outputs = list[Any]()
        noting = model.register_forward_hook(lambda _, inputs, output: outputs.append(output))
        try:
            yield
        finally:
            noting.remove()

    def add(self, number: int, samples: int, compare: Callable[[Any], tuple[Any, Any]]) -> None:
        """Count the batch that was recorded last.

        Args:
            compare: the model's outputs → what metrics compare with what.

        Raises:
            TrainingError: a metric failed, or changed what it was given.
        """
        if not self._metrics:
            return
        if len(self._outputs) != 1:
            raise RequestError(
                f"{self._metrics[0].label}: the task calls the model {len(self._outputs)} times for a batch, and a "
                "metric compares the outputs of one call",
                remedy="leave out --metric",
            )
        outputs, targets = compare(self._outputs.pop())
        versions = TensorVersions({"outputs": outputs, "targets": targets})
        for metric in self._metrics:
            metric.add(number, outputs, targets, samples)
            if changed := versions.find_changed():
                raise TrainingError(
                    f"{metric.label}: it changed its {changed}, which others are still to see", remedy="clone() first"
                )

    def reduce(self, world: World, moved: Moved) -> dict[str, float]:
        """Each metric's number, by its name; all ranks call it together."""
        return {metric.name: metric.reduce(world, moved) for metric in self._metrics}
