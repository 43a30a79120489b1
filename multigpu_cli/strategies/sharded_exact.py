"""--exact with --multi-gpu fsdp: the same bits as without sharding, on any number of workers.

It is the tree of exact.py, for this worker's rows alone. Each pass reduces: every worker sends the rows of its gradient
to those who hold them, and they add them up. The workers take successive micro-batches in a pass (`BatchPlan.
interleaved`), so the leaves come from left to right, and no more sums wait than the logarithm of their number.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from multigpu_cli.runtime.collectives import all_gather, all_reduce_sum
from multigpu_cli.runtime.world import World
from multigpu_cli.strategies.reduction_tree import ReductionTree
from multigpu_cli.strategies.row_sum import RowSum
from multigpu_cli.strategies.sharded import Sharded
from multigpu_cli.strategies.weight_layouts import WeightLayouts, copy_to_layout
from multigpu_cli.strategies.whole_tails import WholeTails


class ExactSharded(Sharded):
    """FSDP2 with gradients that are summed in a fixed order; see `Sharded` for the arguments.

    Parameters without a gradient count as zeros, as without sharding.

    Raises:
        RequestError: the weights can't be divided, or their rows do not lie one after the other in memory.
    """

    keeps_casts = True  # without sharding the gradient of a weight that is used twice is rounded once, in the cast
    reduces_each_pass = True

    def __init__(
        self,
        model: nn.Module,
        world: World,
        optimizer: torch.optim.Optimizer | None = None,
        average: nn.Module | None = None,
        **settings: Any,
    ) -> None:
        layouts, of_average = WeightLayouts(model), average and WeightLayouts(average)
        super().__init__(model, world, None, average, **settings)
        layouts.restore_in_forward()
        if of_average:
            of_average.restore_in_forward()
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._strides = {rows: layouts.unusual.get(names[id(parameter)]) for rows, parameter in self._parts.items()}
        self._sums = [_replace_reduction(part, world) for part in model.modules() if isinstance(part, FSDPModule)]
        self._changes: ReductionTree[list[Tensor]] = ReductionTree(_add)  # of floating buffers
        if optimizer is not None:
            self.attach_optimizer(optimizer)

    def attach_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        super().attach_optimizer(optimizer)
        tails = WholeTails(optimizer)
        for parameter, rows in self._pairs:
            start = sum(_divide(parameter.shape, self._world.size)[: self._world.rank])
            tails.add(rows, start, parameter.numel(), self._strides[rows])

    def begin_step(self, micro_batches: int) -> None:
        super().begin_step(micro_batches)
        self._micro_batches = micro_batches
        self._changes.nodes.clear()  # like the rest, of a step that was not finished
        for parameter, _ in self._pairs:
            parameter.grad = None
        for rows in self._sums:
            rows.begin_step(micro_batches)

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        with super().accumulate(last=last):
            yield
        for rows in self._sums:
            rows.end_pass()

    def local_gradients(self) -> list[Tensor]:
        """None: they are sent in each pass."""
        return []

    def after_backward(self, number: int) -> None:
        self._push_changes(self._buffers.take_change())

    def reduce_gradients(self, *, idle: bool) -> None:
        super().reduce_gradients(idle=idle)
        for rows in self.trained:
            rows.grad = torch.zeros_like(rows) if rows.grad is None else rows.grad

    def total_norm(self, local: Tensor) -> Tensor:
        """The norm () in the order of one process: that of the norms of whole tensors.

        Each worker receives the rows of some gradients, one at a time.
        """
        norms, workers, rank = local.new_zeros(len(self._pairs)), self._world.size, self._world.rank
        for first in range(0, len(norms), workers):
            gradient = self._exchange_gradients(range(first, min(first + workers, len(norms))))
            if gradient is not None:
                norms[first + rank] = torch._foreach_norm([gradient])[0]
        norm, rounded = torch.linalg.vector_norm(all_reduce_sum(self._world, norms)), super().total_norm(local)
        return torch.where(rounded.isnan(), rounded, norm)  # as it is where workers ran different blocks

    def _exchange_gradients(self, places: Sequence[int]) -> Tensor | None:
        """The whole gradient of one of these places on each worker; None on those for which there is none."""
        workers, own = self._world.size, self._world.rank < len(places)
        sent = [cast(Tensor, self.trained[place].grad).flatten() for place in places]
        sizes = [part.numel() for part in sent] + [0] * (workers - len(sent))
        place = places[self._world.rank] if own else 0
        parameter = self._pairs[place][0]
        parts = _divide(parameter.shape, workers) if own else [0] * workers
        whole = sent[0].new_empty(sum(parts))
        dist.all_to_all_single(whole, torch.cat(sent), parts, sizes)
        return copy_to_layout(whole.view(parameter.shape), self._strides[self.trained[place]]) if own else None

    def _finish_sums(self) -> list[Tensor]:
        for rows in self._sums:
            rows.finish_step()
        return self._changes.total()

    def _end_padding_pass(self) -> None:
        super()._end_padding_pass()
        self._push_changes(self._buffers.no_change())

    def _push_changes(self, own: list[Tensor]) -> None:
        """Add what the workers' micro-batches of one pass changed in floating buffers."""
        first = (self._done - 1) * self._world.size
        of_all = [all_gather(self._world, change) for change in own]
        for number in range(first, min(first + self._world.size, self._micro_batches)):
            self._changes.push(0, number, [changes[number - first] for changes in of_all])


def _replace_reduction(module: FSDPModule, world: World) -> RowSum:
    rows = RowSum(world.size)
    module.set_custom_reduce_scatter(rows)  # type: ignore[arg-type]  # it has the methods, and torch keeps the class private
    module.register_forward_pre_hook(rows.note_forward)  # type: ignore[attr-defined]
    return rows


def _add(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    return [one.add_(other) for one, other in zip(left, right, strict=True)]


def _divide(shape: Sequence[int], workers: int) -> list[int]:
    """How many numbers of a parameter each worker holds, as `fully_shard` divides it."""
    rows = -(-shape[0] // workers)
    return [max(0, min(rows, shape[0] - rank * rows)) * prod(shape[1:]) for rank in range(workers)]
