"""The order of samples, their division into splits, and random numbers: functions of seed, epoch and sample alone.

Random numbers for augmentation are drawn for whole batches at once, so a sample is augmented in the same way on any
worker or device, in any batch and any order of batches.

Rows on a disk are divided into parts without a list of rows: of each ten side by side, the seed draws those held out.
The parts are the same whatever the memory, sorted files give every part its share, and neighbours stay neighbours.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from multigpu_cli.errors import RequestError, pluralize
from multigpu_cli.planning.batch import make_key

_BLOCKS = 0xB10C  # separates the orders of blocks from those of samples
EVAL_EPOCH = 1 << 40  # the epoch number of evaluation, so that random transforms give the same result each time


def shuffle_numbers(count: int, *key: int) -> Tensor:
    """(count,) int64: 0 … count-1, in an order that follows from the key alone; of an epoch that is seed and epoch."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(make_key(*key)))


class OrderOfEpoch(Protocol):
    """The order of one epoch, of which parts are asked for: a tensor is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, positions: slice, /) -> Tensor:
        """(n,) int64: the samples at some positions."""


class OrderByPieces(ABC):
    """An order made piece by piece, the last of which is kept; `starts` has the first position of each, and the end."""

    def __init__(self, starts: Sequence[int]) -> None:
        self._starts = starts
        self._last: tuple[int, Tensor] = -1, torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, positions: slice, /) -> Tensor:
        """(n,) int64: the samples at some positions."""
        first, last, step = positions.indices(len(self))
        parts, number = [], bisect_right(self._starts, first) - 1
        while first < last:
            if self._last[0] != number:
                self._last = number, self.make_piece(number)
            start, stop = self._starts[number : number + 2]
            parts.append(self._last[1][first - start : last - start])
            first, number = stop, number + 1
        found = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
        return found[::step]

    @abstractmethod
    def make_piece(self, number: int) -> Tensor:
        """(n,) int64: the samples of a piece in order."""


class BlockOrder(OrderByPieces):
    """An order for samples on a disk: blocks of neighbours are shuffled, and then the samples of several blocks.

    Each sample comes once. A block's samples lie side by side and stay in one window; the last block may be shorter.
    The samples of so many blocks as a `window` has are mixed with each other. What lies in memory is a number for each
    block, and one for each sample of a window.
    """

    def __init__(self, count: int, seed: int, epoch: int, block: int, window: int) -> None:
        self._count, self._block, self._window = count, block, window
        self._key = seed, epoch, _BLOCKS
        self._blocks = shuffle_numbers(-(-count // block), *self._key)
        missing = -count % block  # in the shorter block
        short = int((self._blocks == len(self._blocks) - 1).nonzero()) // window if missing else -1
        size, windows = block * window, -(-len(self._blocks) // window)
        super().__init__([at * size - (missing if missing and at > short else 0) for at in range(windows)] + [count])

    def make_piece(self, number: int) -> Tensor:
        blocks = self._blocks[number * self._window : (number + 1) * self._window]
        samples = (blocks[:, None] * self._block + torch.arange(self._block)).flatten()
        samples = samples[samples < self._count]
        return samples[shuffle_numbers(len(samples), *self._key, number)]


def shuffle_epoch(count: int, seed: int, epoch: int, block: int | None, window: int) -> OrderOfEpoch:
    """The order of an epoch: of samples, or of blocks and samples in them where `block` is a number."""
    return shuffle_numbers(count, seed, epoch) if block is None else BlockOrder(count, seed, epoch, block, window)


class SampleOrder(Protocol):
    """The user's own order of samples: the length of an epoch, and the sample at each position."""

    def __len__(self) -> int: ...

    def __call__(self, epoch: int) -> OrderOfEpoch:
        """(count,) int64; must be the same on every rank and in every call."""


_UNSIGNED = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_GAMMA, _MIX1, _MIX2 = (number - (1 << 64) for number in _UNSIGNED)  # as int64


def _mix_bits(x: Tensor) -> Tensor:
    """SplitMix64's finalizer (Steele, Lea and Flood 2014) on int64; the masks make the shifts logical."""
    x = x + _GAMMA
    x.bitwise_xor_((x >> 30).bitwise_and_(0x3FFFFFFFF)).mul_(_MIX1)
    x.bitwise_xor_((x >> 27).bitwise_and_(0x1FFFFFFFFF)).mul_(_MIX2)
    return x.bitwise_xor_((x >> 31).bitwise_and_(0x1FFFFFFFF))


@lru_cache
def _stream_keys(streams: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """(columns,) int64 below 2³²: the keys of the streams' columns; cached, since every batch needs them."""
    return torch.cat([torch.arange(count, device=device) + (stream << 20) for stream, count in streams])


class KeyedRandom:
    """The random numbers of one batch of samples, by their `indices` (n,) int64 in the dataset, on one device."""

    def __init__(self, seed: int, epoch: int, indices: Tensor) -> None:
        self._key, self._counters = make_key(seed, epoch), indices[:, None] << 32

    def uniform(self, stream: int, count: int = 1) -> Tensor:
        """(n, count) float32 in [0, 1); each use in an augmentation needs its own stream number."""
        return self.uniform_streams((stream, count))

    def uniform_streams(self, *streams: tuple[int, int]) -> Tensor:
        """(n, columns): the numbers of several (stream, count), concatenated."""
        bits = _mix_bits((self._counters + _stream_keys(streams, self._counters.device)).bitwise_xor_(self._key))
        return bits.bitwise_and_(0xFFFFFF).float().div_(1 << 24)


SPLIT = 0x5917  # separates the split's random stream from the epochs' orders


def split_by_sample(count: int, fractions: tuple[float, ...], seed: int) -> list[Tensor]:
    """Index tensors of consecutive parts of a shuffled dataset; the first part has the remainder.

    `fractions` are the shares of the parts after it, e.g. (0.1, 0.1) for 80/10/10.
    """
    sizes = [round(count * fraction) for fraction in fractions]
    first = count - sum(sizes)
    if first < 1 or any(size < 1 for size in sizes):
        problem = f"--data: {pluralize(count, 'sample')} can't be divided into {len(sizes) + 1} parts"
        raise RequestError(problem, remedy="use more samples, or a dataset with its own train, val and test splits")
    return list(torch.split(shuffle_numbers(count, seed, SPLIT), [first, *sizes]))


_GROUP = 10  # rows, of which each held-out part has one
_SPREAD = 0x5B2EAD  # separates this split's random numbers from those of other streams


@dataclass(frozen=True)
class RowSelection:
    """The rows of one part: a function of its arguments, and no list."""

    rows: int
    parts: int = 0  # how many parts are held out: 0 where the store is not divided, 1 or 2
    part: int = 0  # 0 is the training part, which also has what is left over; 1 and 2 are those held out
    key: int = 0  # of the random numbers

    def __len__(self) -> int:
        groups = self.rows // _GROUP
        return groups if self.part else self.rows - self.parts * groups

    def find_rows(self, positions: Sequence[int] | np.ndarray) -> np.ndarray:
        """(n,) int64: the rows at some positions of the part."""
        at = np.asarray(positions, dtype=np.int64)
        if not self.parts:
            return at
        if self.part:
            chosen: np.ndarray = at * _GROUP + self._draw(at)[self.part - 1]
            return chosen
        share = _GROUP - self.parts
        group = np.minimum(at // share, self.rows // _GROUP)
        place = at - group * share
        inside = group < self.rows // _GROUP  # behind the last whole group nothing is held out
        held_out = self._draw(group)
        for held in held_out if self.parts == 1 else (np.minimum(*held_out), np.maximum(*held_out)):
            place += inside & (place >= held)
        found: np.ndarray = group * _GROUP + place
        return found

    def _draw(self, groups: np.ndarray) -> tuple[np.ndarray, ...]:
        """For each part (n,): the different places in a group that are held out."""
        mixed = _mix_bits(torch.from_numpy(groups ^ self.key) - _GAMMA).numpy().view(np.uint64)  # without the addition
        first = (mixed % np.uint64(_GROUP)).astype(np.int64)
        if self.parts == 1:
            return (first,)
        second = ((mixed >> np.uint64(32)) % np.uint64(_GROUP - 1)).astype(np.int64)
        return first, second + (second >= first)


def divide_rows(rows: int, parts: int, seed: int, where: str) -> list[RowSelection]:
    """The training part, and so many held-out parts of a tenth each; a message names the rows by `where`."""
    if parts and rows < _GROUP:
        problem = f"{where}: {pluralize(rows, 'row')} can't be divided into {parts + 1} parts"
        raise RequestError(problem, remedy=f"at least {_GROUP} rows, or parts of your own: train, validation and test")
    return [RowSelection(rows, parts, part, make_key(seed, _SPREAD)) for part in range(parts + 1)]
