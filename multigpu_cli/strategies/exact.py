"""--exact: the same bits on any number of workers.

Every micro-batch is a leaf of one canonical tree (`ReductionTree`): its gradient, and what it changed in the buffers.
Accumulating in `.grad` would be another tree, ((g0+g1)+g2)+g3, and so would any library's reduction over more than two
ranks; here all arithmetic is `a + b` on this device, and communication only moves bytes.

The tree: leaves are numbered from the left. Two nodes of one level whose numbers are 2k and 2k+1 are buddies and make
node k of the next level; what has no buddy at the end is added from the right. Which additions happen, and in which
order, depends on the number of leaves alone: a worker sums its contiguous block as far as buddies allow, and the same
tree goes on across workers.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from multigpu_cli.distributed.world import World
from multigpu_cli.strategies.base import Setup, Strategy
from multigpu_cli.strategies.ddp import CommWait

Sum = list[Tensor]  # one tensor for each parameter, and for each number format of floating buffers


class ExactReduction(Strategy):
    """Reduces gradients after backward in a fixed order, in place of DDP; parameters without one count as zeros."""

    name = "exact"

    def __init__(self, model: nn.Module, world: World) -> None:
        super().__init__(model, world, always=True)
        self._leaves: int  # of the step that has begun
        self._tree: ReductionTree[Sum] = ReductionTree(_add)
        self._wait = CommWait([], world.device)

    @classmethod
    def create(cls, model: nn.Module, setup: Setup) -> Strategy:
        return cls(model, setup.world)

    def begin_step(self, micro_batches: int) -> None:
        self._leaves = micro_batches
        self._buffers.begin_step(micro_batches)

    @torch.no_grad()
    def after_backward(self, number: int) -> None:
        leaf = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.local_parameters]
        for parameter in self.local_parameters:
            parameter.grad = None
        self._tree.push(0, number, leaf + self._buffers.take_change(number))

    def abort_step(self) -> None:
        super().abort_step()
        self._tree.nodes.clear()

    @torch.no_grad()
    def reduce_gradients(self, *, idle: bool) -> None:
        if self._world.size == 1:
            whole = self._tree.total()
        else:
            with self._wait:
                whole = self._across_workers()
        for parameter, gradient in zip(self.local_parameters, whole, strict=False):
            parameter.grad = gradient
        self._buffers.apply_mean_change(whole[len(self.local_parameters) :])

    def read_comm_wait(self) -> float | None:
        return self._wait.read()

    def _across_workers(self) -> Sum:
        """Continue the same tree over the workers; every rank gets the same sum."""
        ranks = self._world.size
        borders = [self._leaves * rank // ranks for rank in range(ranks + 1)]  # the same division as in BatchPlan
        covers = [cover(*block) for block in pairwise(borders)]
        local = [node.value for node in self._tree.nodes]
        self._tree.nodes.clear()
        result = local[0] if local else [*map(torch.zeros_like, self.local_parameters), *self._buffers.no_change()]
        by_dtype: dict[torch.dtype, list[int]] = {}
        for place, tensor in enumerate(result):
            by_dtype.setdefault(tensor.dtype, []).append(place)
        for places in by_dtype.values():  # each dtype by itself: rounding is the same as on one worker
            flat = [torch.cat([value[place].flatten() for place in places]) for value in local]
            total = self._sum_over_workers(flat, covers, [result[place] for place in places])
            for place, part in zip(places, total.split([result[place].numel() for place in places]), strict=True):
                result[place].copy_(part.view_as(result[place]))  # in place: the memory layout of one worker
        return result

    def _sum_over_workers(self, flat: list[Tensor], covers: list[list[tuple[int, int]]], like: Sum) -> Tensor:
        """The sum over workers of the vectors of their nodes: in pairs, if a power of two of workers hold one each."""
        levels = {level for nodes in covers for level, _ in nodes}
        if len(levels) > 1 or any(len(nodes) != 1 for nodes in covers) or len(covers).bit_count() > 1:
            return self._by_pieces(flat, covers, like)
        _sum_in_pairs(flat[0], self._world)
        return flat[0]

    def _by_pieces(self, flat: list[Tensor], covers: list[list[tuple[int, int]]], like: Sum) -> Tensor:
        """Each rank finishes the tree for its own piece of the vector, and then the pieces are gathered."""
        ranks, size = self._world.size, sum(t.numel() for t in like)
        piece = -(-size // ranks)
        padded = like[0].new_zeros(len(flat), piece * ranks)
        for row, vector in zip(padded, flat, strict=True):
            row[:size] = vector
        outgoing = [padded[:, rank * piece : (rank + 1) * piece].contiguous() for rank in range(ranks)]
        incoming = [like[0].new_empty(len(nodes), piece) for nodes in covers]
        _exchange(outgoing, incoming, self._world)
        tree: ReductionTree[Tensor] = ReductionTree(lambda left, right: left.add_(right))
        for nodes, rows in zip(covers, incoming, strict=True):
            for (level, number), row in zip(nodes, rows, strict=True):
                tree.push(level, number, row)
        pieces = [like[0].new_empty(piece) for _ in range(ranks)]
        dist.all_gather(pieces, tree.total().contiguous())
        return torch.cat(pieces)[:size]


def _sum_in_pairs(vector: Tensor, world: World) -> None:
    """Sum over a power of two of workers by recursive halving and doubling, in place.

    Ranks at distance 1, 2, 4, … are buddies of the tree; each of a pair adds one half of what they share.
    Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
    """
    low, high, distance = 0, vector.numel(), 1
    trail: list[tuple[int, int, int]] = []
    while distance < world.size:
        partner, middle = world.rank ^ distance, (low + high) // 2
        trail.append((low, high, partner))
        kept, given = ((low, middle), (middle, high)) if world.rank < partner else ((middle, high), (low, middle))
        vector[slice(*kept)] += _swap(vector[slice(*given)], vector.new_empty(kept[1] - kept[0]), partner)
        (low, high), distance = kept, distance * 2
    for whole_low, whole_high, partner in reversed(trail):
        lost = (high, whole_high) if low == whole_low else (whole_low, low)
        _swap(vector[low:high], vector[slice(*lost)], partner)
        low, high = whole_low, whole_high


def _swap(piece: Tensor, received: Tensor, partner: int) -> Tensor:
    """Send a piece to the partner, and return what it sends, in the memory given for that."""
    swap = [dist.P2POp(dist.isend, piece.contiguous(), partner), dist.P2POp(dist.irecv, received, partner)]
    for request in dist.batch_isend_irecv(swap):
        request.wait()
    return received


def _exchange(outgoing: list[Tensor], incoming: list[Tensor], world: World) -> None:
    """Rank i's outgoing[j] becomes rank j's incoming[i]; pieces may differ in their number of rows, which may be 0."""
    received = torch.empty(sum(t.numel() for t in incoming), dtype=incoming[0].dtype, device=world.device)
    sizes = [t.numel() for t in incoming]
    dist.all_to_all_single(received, torch.cat([t.flatten() for t in outgoing]), sizes, [t.numel() for t in outgoing])
    for target, part in zip(incoming, received.split(sizes), strict=True):
        target.copy_(part.view_as(target))


def _add(left: Sum, right: Sum) -> Sum:
    torch._foreach_add_(left, right)
    return left


Value = TypeVar("Value")


class Node(NamedTuple, Generic[Value]):
    """The sum of the leaves number·2^level … (number+1)·2^level - 1."""

    level: int
    number: int
    value: Value


class ReductionTree(Generic[Value]):
    """A binary counter: leaves or nodes arrive from left to right, buddies merge at once; `add` may reuse its left."""

    def __init__(self, add: Callable[[Value, Value], Value]) -> None:
        self._add = add
        self.nodes: list[Node[Value]] = []

    def push(self, level: int, number: int, value: Value) -> None:
        """Append the next node and merge it with its buddies, as far as they are here."""
        while number & 1 and self.nodes and self.nodes[-1][:2] == (level, number - 1):
            value = self._add(self.nodes.pop().value, value)
            level, number = level + 1, number >> 1
        self.nodes.append(Node(level, number, value))

    def total(self) -> Value:
        """The sum of everything, what has no buddy added from the right; the tree is empty afterwards."""
        value = self.nodes.pop().value
        while self.nodes:
            value = self._add(self.nodes.pop().value, value)
        return value


def cover(first: int, stop: int) -> list[tuple[int, int]]:
    """(level, number) of the nodes that a worker is left with after summing leaves first … stop-1, from the left."""
    tree: ReductionTree[None] = ReductionTree(lambda left, right: None)
    for leaf in range(first, stop):
        tree.push(0, leaf, None)
    return [(node.level, node.number) for node in tree.nodes]
