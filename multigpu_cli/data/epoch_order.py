"""The order of training samples in an epoch, a function of seed and epoch only."""

from bisect import bisect_right
from typing import Protocol

import torch
from torch import Tensor

from multigpu_cli.planning.rng_keys import make_key

_BLOCKS = 0xB10C  # separates the orders of blocks from those of samples
EVAL_EPOCH = 1 << 40  # the epoch number of evaluation, so that random transforms give the same result each time


def epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """(count,) int64: the sample at each position of an epoch."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(make_key(seed, epoch)))


class OrderOfEpoch(Protocol):
    """The order of one epoch, of which parts are asked for: a tensor is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, positions: slice, /) -> Tensor:
        """(n,) int64: the samples at some positions."""


class BlockOrder:
    """An order for samples on a disk: blocks of neighbours are shuffled, and then the samples of several blocks.

    Each sample comes once. What lies in memory is a number for each block, and one for each sample of a window.

    Args:
        count: of samples.
        block: samples side by side that stay in one window; the last block may be shorter.
        window: blocks whose samples are mixed with each other.
    """

    def __init__(self, count: int, seed: int, epoch: int, block: int, window: int) -> None:
        self._count, self._block, self._window = count, block, window
        self._key = seed, epoch, _BLOCKS
        self._blocks = torch.randperm(-(-count // block), generator=_make_generator(*self._key))
        self._last: tuple[int, Tensor] = -1, torch.empty(0, dtype=torch.int64)
        missing = -count % block  # in the shorter block
        short = int((self._blocks == len(self._blocks) - 1).nonzero()) // window if missing else -1
        size, windows = block * window, -(-len(self._blocks) // window)
        self._starts = [at * size - (missing if missing and at > short else 0) for at in range(windows)] + [count]

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, positions: slice, /) -> Tensor:
        """(n,) int64: the samples at some positions."""
        first, last, step = positions.indices(self._count)
        parts, number = [], bisect_right(self._starts, first) - 1
        while first < last:
            start, stop = self._starts[number : number + 2]
            parts.append(self._mix_window(number)[first - start : last - start])
            first, number = stop, number + 1
        found = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
        return found[::step]

    def _mix_window(self, number: int) -> Tensor:
        """The samples of a window in order; the last one asked for is kept."""
        if self._last[0] != number:
            blocks = self._blocks[number * self._window : (number + 1) * self._window]
            samples = (blocks[:, None] * self._block + torch.arange(self._block)).flatten()
            samples = samples[samples < self._count]
            mixed = torch.randperm(len(samples), generator=_make_generator(*self._key, number))
            self._last = number, samples[mixed]
        return self._last[1]


def shuffle_epoch(count: int, seed: int, epoch: int, block: int | None, window: int) -> OrderOfEpoch:
    """The order of an epoch: of samples, or of blocks and samples in them where `block` is a number."""
    return epoch_order(count, seed, epoch) if block is None else BlockOrder(count, seed, epoch, block, window)


def _make_generator(*key: int) -> torch.Generator:
    return torch.Generator().manual_seed(make_key(*key))


class SampleOrder(Protocol):
    """The user's own order of samples: the length of an epoch, and the sample at each position."""

    def __len__(self) -> int: ...

    def __call__(self, epoch: int) -> OrderOfEpoch:
        """(count,) int64; must be the same on every rank and in every call."""
