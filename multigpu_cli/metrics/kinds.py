"""The kinds of metrics: sums over the split, all outputs in order, one value for each sample."""

from collections.abc import Mapping
from math import fsum, inf, nan
from typing import Any

import torch
from torch import Tensor

from multigpu_cli.distributed.collectives import all_reduce_max, all_reduce_sum, broadcast_object, run_on_main_rank
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import TrainingError
from multigpu_cli.runtime.factories import name_own_code
from multigpu_cli.tasks.metric import Metric, Moved, describe_value, to_tensor

_SAME_LENGTH = "a tensor (k,), with the same k for every batch, of sums over the samples of the batch"


class SummedMetric(Metric):
    """An object with `sums(outputs, targets)`, (k,) for a batch, and `compute` of their sum over the split.

    Whole numbers are added as int64. Others have a slot for each batch, and the slots are added without rounding, as
    float64.
    """

    def begin(self, batches: int, world: World) -> None:
        self._object, self._batches = self._own_code(), batches
        self._whole: Tensor | None = None  # (k,) int64
        self._parts: dict[int, Tensor] = {}  # (k,) float64, by the number of the batch

    def add(self, number: int, outputs: Any, targets: Any, samples: int) -> None:
        with name_own_code(f"{self.label}: sums"):
            found = self._object.sums(outputs, targets)
        sums, before = to_tensor(found), self._whole if self._whole is not None else next(iter(self._parts.values()), 0)
        same = isinstance(before, int) or (sums is not None and sums.shape == before.shape)
        if sums is None or sums.ndim != 1 or not same or sums.is_complex():
            raise TrainingError(
                f"{self.label}: sums returned {describe_value(found)}",
                remedy=_SAME_LENGTH,
            )
        if sums.is_floating_point():
            self._parts[number] = sums.double()
        else:
            self._whole = sums.long() if self._whole is None else self._whole + sums

    def reduce(self, world: World, moved: Moved) -> float:
        known = self._whole if self._whole is not None else next(iter(self._parts.values()), None)
        own = 0 if known is None else known.numel()
        other = -own if own else -inf  # the shortest, as a maximum; a rank without batches has none
        size, shortest, real, whole = all_reduce_max(world, [own, other, bool(self._parts), self._whole is not None])
        if -shortest < size:
            raise TrainingError(
                f"{self.label}: sums returned {-shortest:.0f} numbers for some batches and {size:.0f} for others",
                remedy=_SAME_LENGTH,
            )
        if real and whole:
            raise TrainingError(f"{self.label}: sums returned whole numbers for some batches only", remedy="one type")
        sums = self._add_parts(world, int(size)) if real else self._add_whole(world, int(size))

        def compute() -> float:
            with name_own_code(f"{self.label}: compute"):
                value = self._object.compute(sums)
            return self.parse_number(value)

        return run_on_main_rank(world, compute)

    def _add_whole(self, world: World, size: int) -> Tensor:
        """(k,) int64"""
        own = torch.zeros(size, dtype=torch.int64, device=world.device) if self._whole is None else self._whole
        return all_reduce_sum(world, own.to(world.device)).cpu()

    def _add_parts(self, world: World, size: int) -> Tensor:
        """(k,) float64"""
        slots = torch.zeros(size, self._batches, dtype=torch.float64, device=world.device)
        for number, sums in self._parts.items():
            slots[:, number] = sums
        return torch.tensor([_add(row) for row in all_reduce_sum(world, slots).tolist()], dtype=torch.float64)


def _add(values: list[float]) -> float:
    try:
        return fsum(values)
    except (ValueError, OverflowError):  # infinities of both signs
        return nan


class OrderedMetric(Metric):
    """An object with `update(outputs, targets)`, called on rank 0 for each batch in order, and `compute()`.

    What the object keeps is its own affair, so any such class is exact: also torchmetrics', whose own exchange between
    processes is turned off. Outputs and targets come in host memory. The other ranks keep theirs until the pass ends,
    and send them batch by batch.
    """

    def begin(self, batches: int, world: World) -> None:
        self._object, self._batches, self._is_main = self._own_code(), batches, world.is_main
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


class PerSampleMetric(Metric):
    """The mean of one value for each sample, or the sum of numerators over the sum of denominators.

    Each batch is summed in float64 into a slot of its own, which one worker fills; the slots are added without rounding
    (Shewchuk's fsum). So the bits do not depend on the number of workers.
    """

    def begin(self, batches: int, world: World) -> None:
        self._slots = torch.zeros(2, batches, dtype=torch.float64, device=world.device)

    def add(self, number: int, outputs: Any, targets: Any, samples: int) -> None:
        with name_own_code(f"{self.label}: it"):
            found = self._own_code(outputs, targets)
        parts = found if isinstance(found, tuple) and len(found) == 2 else (found,)
        for row, part in zip(self._slots, parts, strict=False):
            row[number] = self._check_shape(part, found, samples).double().sum()
        if len(parts) == 1:
            self._slots[1, number] = samples

    def _check_shape(self, part: Any, found: Any, samples: int) -> Tensor:
        values = to_tensor(part)
        if values is None or values.shape != (samples,) or values.is_complex():
            several = isinstance(found, tuple)
            returned = f"({', '.join(map(describe_value, found))})" if several else describe_value(found)
            raise TrainingError(
                f"{self.label}: it returned {returned} for {samples} samples",
                remedy="one value for each sample, (n,), or a pair of numerators and denominators, each (n,); for what "
                "is no mean over samples a class with update and compute",
            )
        return values

    def reduce(self, world: World, moved: Moved) -> float:
        numerators, denominators = all_reduce_sum(world, self._slots).tolist()
        try:
            return fsum(numerators) / fsum(denominators)
        except (ZeroDivisionError, ValueError, OverflowError):  # no sample has a share; infinities of both signs
            return nan
