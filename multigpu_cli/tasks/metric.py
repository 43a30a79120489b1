"""The interface of metrics, one number over a split with each sample counted once, and the meter that feeds them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from multigpu_cli.data.collate import describe_shapes
from multigpu_cli.distributed.world import World, run_on_main_rank
from multigpu_cli.errors import RequestError, TrainingError
from multigpu_cli.runtime.factories import name_own_code
from multigpu_cli.runtime.module_state import TensorVersions

Moved = Callable[[], None]


class Metric(ABC):
    """One metric beside the task's own: begun, given this worker's batches in order, and reduced over all workers.

    A split is cut into the same batches on any number of workers, and each worker has a contiguous block of them. In
    journal and summary it is called val_NAME and test_NAME. `code` is what --metric names; `own_code` makes a fresh
    object for each evaluation, or is the function: outputs, targets → (n,) values, or a pair.
    """

    def __init__(self, name: str, code: str, own_code: Callable[..., Any]) -> None:
        self.name, self.label, self._own_code = name, f"--metric {code}", own_code

    @abstractmethod
    def begin(self, batches: int, world: World) -> None:
        """An evaluation begins, of so many batches over all workers."""

    @abstractmethod
    def add(self, number: int, outputs: Any, targets: Any, samples: int) -> None:
        """Count one of this worker's batches, by its number over all workers; it must not communicate.

        Outputs and targets are what `Task.pair_with_targets` returned. TrainingError where the user's code failed, or
        returned something else than it has to.
        """

    @abstractmethod
    def reduce(self, world: World, moved: Moved) -> float:
        """The number over the whole split on every rank; all ranks call it together. It calls `moved` now and then."""

    def compute_on_main_rank(self, world: World, compute: Callable[[], Any]) -> float:
        """The number that the user's `compute` returns on rank 0; TrainingError where it fails, or returns none."""

        def compute_number() -> float:
            with name_own_code(f"{self.label}: compute"):
                value = compute()
            if isinstance(value, Tensor) and value.numel() == 1:
                value = value.detach().reshape(()).double().item()
            if isinstance(value, bool) or not hasattr(value, "__float__") or getattr(value, "ndim", 0) != 0:
                problem = f"{self.label}: compute returned {describe_shapes(value)}, not a number"
                raise TrainingError(problem, remedy="one metric for each")
            return float(value)

        return run_on_main_rank(world, compute_number)


def to_tensor(value: Any) -> Tensor | None:
    """A tensor, an array or a list of numbers as a tensor; None for anything else."""
    if isinstance(value, Tensor):
        return value.detach()
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return None


class MetricMeter:
    """Takes the model's outputs out of the task's own pass over each batch, so that none is computed twice."""

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
        """Count the batch recorded last; `compare` makes of the model's outputs what metrics compare with what."""
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
                    f"{metric.label}: it changed its {changed}, which other metrics still read", remedy="clone() first"
                )

    def reduce(self, world: World, moved: Moved) -> dict[str, float]:
        """Each metric's number, by its name; all ranks call it together."""
        return {metric.name: metric.reduce(world, moved) for metric in self._metrics}
