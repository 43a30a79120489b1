"""A metric that needs the whole split, such as a rank correlation: rank 0 sees all samples in their order."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from multigpu_cli.errors import TrainingError
from multigpu_cli.runtime.collectives import broadcast_object
from multigpu_cli.runtime.own_code_error import name_own_code
from multigpu_cli.runtime.raise_on_all_ranks import run_on_main_rank
from multigpu_cli.runtime.world import World
from multigpu_cli.tasks.metrics.base import Metric, Moved


class OrderedMetric(Metric):
    """An object with `update(outputs, targets)`, called on rank 0 for each batch in order, and `compute()`.

    What the object keeps is its own affair, so any such class is exact: also torchmetrics', whose own exchange between
    processes is turned off. Outputs and targets come in host memory. The other ranks keep theirs until the pass ends,
    and send them batch by batch.

    Args:
        make: a fresh object for each evaluation.
    """

    def __init__(self, name: str, code: str, make: Callable[[], Any]) -> None:
        super().__init__(name, code)
        self._make = make

    def begin(self, batches: int, world: World) -> None:
        self._object, self._batches, self._is_main = self._make(), batches, world.is_main
        for part in self._object.modules() if hasattr(self._object, "modules") else ():
            if hasattr(part, "distributed_available_fn"):  # torchmetrics', which would wait for the other ranks
                part.distributed_available_fn = lambda: False
        self._own: dict[int, Any] = {}

    def add(self, number: int, outputs: Any, targets: Any, samples: int) -> None:
        pair = [self._copy_to_host(part) for part in (outputs, targets)]
        if self._is_main:  # rank 0 has the first block of batches
            self._update(pair)
        else:
            self._own[number] = pair

    def reduce(self, world: World, moved: Moved) -> float:
        error: TrainingError | None = None
        for source in range(1, world.size):
            block = range(self._batches * source // world.size, self._batches * (source + 1) // world.size)
            for number in block:
                pair = broadcast_object(world, self._own.pop(number, None), source=source)
                moved()
                if self._is_main and error is None:
                    try:
                        self._update(pair)
                    except TrainingError as caught:  # raised below, once the others have sent theirs
                        error = caught

        def compute() -> float:
            if error:
                raise error
            with name_own_code(f"{self.label}: compute"):
                value = self._object.compute()
            return self.parse_number(value)

        return run_on_main_rank(world, compute)

    def _update(self, pair: list[Any]) -> None:
        with name_own_code(f"{self.label}: update"):
            self._object.update(*pair)

    def _copy_to_host(self, value: Any) -> Any:
        """Tensors and plain values, which alone can be sent; in a tuple, list or dict as the model returned them."""
        if isinstance(value, Tensor):
            return value.detach().cpu()
        if isinstance(value, Mapping):
            return {str(name): self._copy_to_host(entry) for name, entry in value.items()}
        if isinstance(value, tuple | list):
            return [self._copy_to_host(entry) for entry in value]
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise TrainingError(
            f"{self.label}: the outputs hold a {type(value).__name__}, which can't be sent to rank 0",
            remedy="a function of outputs and targets with one value for each sample",
        )
