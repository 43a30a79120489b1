"""The interface of metrics: one number over a split, each sample counted once on any number of workers."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from multigpu_cli.errors import TrainingError
from multigpu_cli.runtime.world import World

Moved = Callable[[], None]


class Metric(ABC):
    """One metric beside the task's own: begun, given this worker's batches in order, and reduced over all workers.

    A split is cut into the same batches on any number of workers, and each worker has a contiguous block of them.

    Args:
        name: val_NAME and test_NAME are what it is called in journal and summary.
        code: what --metric names.
    """

    def __init__(self, name: str, code: str) -> None:
        self.name, self.label = name, f"--metric {code}"

    @abstractmethod
    def begin(self, batches: int, world: World) -> None:
        """An evaluation begins, of so many batches over all workers."""

    @abstractmethod
    def add(self, number: int, outputs: Any, targets: Any, samples: int) -> None:
        """Count one of this worker's batches; it must not communicate.

        Args:
            number: of the batch, over all workers.
            outputs, targets: what `Task.pair_with_targets` returned.

        Raises:
            TrainingError: the user's code failed, or returned something else than it has to.
        """

    @abstractmethod
    def reduce(self, world: World, moved: Moved) -> float:
        """The number over the whole split, the same on every rank; all ranks call it together.

        Args:
            moved: called now and then, so that the watchdog sees progress.

        Raises:
            TrainingError: the user's code failed, or returned no number.
        """

    def parse_number(self, value: Any) -> float:
        """What `compute` returned, as a number.

        Raises:
            TrainingError: it is none.
        """
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.detach().reshape(()).double().item()
        if isinstance(value, bool) or not hasattr(value, "__float__") or getattr(value, "ndim", 0) != 0:
            raise TrainingError(
                f"{self.label}: compute returned {describe_value(value)}, not a number", remedy="one metric for each"
            )
        return float(value)


def describe_value(value: Any) -> str:
    """The type of what a metric returned, with its shape."""
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return f"a {type(value).__name__}"


def to_tensor(value: Any) -> Tensor | None:
    """A tensor, an array or a list of numbers as a tensor; None for anything else."""
    if isinstance(value, Tensor):
        return value.detach()
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return None
