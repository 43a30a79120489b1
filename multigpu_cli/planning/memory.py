"""The device memory of training, whole or sharded, from measured parts, for any micro-batch size.

With --multi-gpu fsdp weights, gradients and optimizer state are divided. Each pass gathers one group of weights after
the other, a block and the one ahead of it at a time; the group of what is in no block stays for the whole pass, and so
does its gradient. Blocks are gathered again for the backward pass, for which that group is there still. A gradient is
reduced, and so divided, in the last pass of a step: before that, the whole of it is there. With --exact each pass
reduces: what a worker receives for its rows of a group is as large as the group, and its sums wait for each other as
the nodes of a binary tree do.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on each device; activations take fixed + per_sample × micro-batch."""

    weights: int
    gradients: int
    optimizer: int
    fixed: float
    per_sample: float
    unsharded: int = 0  # weights gathered for a pass, and whole gradients before their reduction, at one time
    in_turn: bool = False  # the gradients come as the activations go; otherwise both are there at one time

    def activations(self, micro_batch: int) -> float:
        return self.fixed + self.per_sample * micro_batch

    def total_bytes(self, micro_batch: int) -> float:
        """All parts, without the allocator's reserve, kernel workspaces and the driver's context."""
        both = (self.gradients, self.activations(micro_batch))
        return self.weights + self.unsharded + self.optimizer + (max(both) if self.in_turn else sum(both))

    def largest_batch(self, capacity: float) -> int:
        """Samples of the largest micro-batch that fits into `capacity` bytes; 0 if none does."""
        left = capacity - self.total_bytes(0)
        if self.in_turn and left >= 0:  # without samples there may be gradients in the place of activations
            left += max(self.gradients, self.fixed) - self.fixed
        return 0 if left < self.per_sample else int(left // self.per_sample) if self.per_sample else 0


def fit_line(one: tuple[int, float], other: tuple[int, float]) -> tuple[float, float]:
    """Intercept and slope of a line through two measurements (batch size, value)."""
    slope = (other[1] - one[1]) / (other[0] - one[0])
    return max(0.0, one[1] - slope * one[0]), slope


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How a model is sharded."""

    blocks: Sequence[int]  # bytes of the weights of each
    rest: int  # bytes of the weights in no block
    keeps_weights: bool = False  # gathered weights stay to the end of the step (--reshard step)
    group_size: int | None = None  # workers that share the weights, which other groups replicate (--shard-size)
    exact: bool = False  # each pass reduces, in the order of --exact
    each_pass: bool = False  # each pass reduces (strategy.reduce=pass)
    share: float = 1.0  # of a weight's bytes that are gathered: 0.5 in bf16

    @property
    def groups(self) -> tuple[int, ...]:
        """Bytes of the weights that are gathered at once, of each group."""
        return (*self.blocks, *([self.rest] if self.rest else []))

    def split_workers(self, workers: int) -> tuple[int, int]:
        """Workers of each group, and the number of groups; all in one where they can't be divided so."""
        size = self.group_size if self.group_size and workers % self.group_size == 0 else workers
        return size, workers // size

    def gathers(self, passes: int) -> float:
        """How often a step gathers the weights, by their bytes: for forward and backward passes."""
        return self.gathers_for_forward(passes) + self.gathers_for_backward(passes)

    def gathers_for_forward(self, passes: int) -> int:
        return 1 if self.keeps_weights else passes

    def gathers_for_backward(self, passes: int) -> float:
        return 0.0 if self.keeps_weights else passes * sum(self.blocks) / sum(self.groups)

    def reductions(self, passes: int) -> int:
        """How often a step reduces the gradients."""
        return passes if self.exact or self.each_pass else 1


@dataclass(frozen=True, kw_only=True)
class ShardedRow:
    """The forecast for one number of workers."""

    workers: int
    passes: int  # micro-batches of a step on each worker
    memory: Memory  # on each of them
    sent: float  # bytes that each worker sends in a step
    sent_by_ddp: float  # the same with --multi-gpu ddp


def forecast_sharded(memory: Memory, sharding: Sharding, workers: int, passes: int) -> ShardedRow:
    """The memory and the traffic of each of so many workers, from the memory of one with the whole model."""
    size, replicas = sharding.split_workers(workers)
    gradients = sharding.reductions(passes) * memory.gradients
    if sharding.exact:
        gradients += _divide(memory.gradients, workers)  # each whole tensor goes to one worker, for its norm
    sent = (size - 1) / size * (sharding.gathers(passes) * sharding.share * sum(sharding.groups) + gradients)
    between = 2 * (replicas - 1) / replicas * memory.gradients / size  # the groups' sums are reduced as those of ddp
    sent += sharding.reductions(passes) * between
    sharded = shard_memory(memory, sharding, workers, passes) if workers > 1 else memory
    by_ddp = 2 * (workers - 1) / workers * memory.gradients
    return ShardedRow(workers=workers, passes=passes, memory=sharded, sent=sent, sent_by_ddp=by_ddp)


def shard_memory(memory: Memory, sharding: Sharding, workers: int, passes: int) -> Memory:
    """The memory of each of several workers; see the head of this file."""
    whole, (size, _) = sum(sharding.groups), sharding.split_workers(workers)
    weights = whole if sharding.keeps_weights else sharding.rest + 2 * max(sharding.blocks, default=0)
    divided = sharding.reductions(passes) == passes
    waiting = sharding.rest if divided else 0
    parts = 1
    if sharding.exact:
        parts += max((done * workers).bit_count() for done in range(1, passes + 1))  # sums without a buddy yet
        waiting += max(sharding.groups, default=0)
    return replace(
        memory,
        weights=memory.weights - whole + _divide(whole, size),  # each worker has all buffers
        gradients=parts * _divide(memory.gradients, size) if divided else memory.gradients,
        optimizer=_divide(memory.optimizer, size),
        unsharded=int(sharding.share * weights) + waiting,
        in_turn=passes == 1,
    )


def _divide(size: int, workers: int) -> int:
    return -(-size // workers)
