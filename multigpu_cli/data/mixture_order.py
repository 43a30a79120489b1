"""Which sample of which source stands at each position of a mixture's epoch: a function of seed and epoch only."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from multigpu_cli.data.epoch_order import OrderOfEpoch, shuffle_epoch
from multigpu_cli.planning.apportion import apportion
from multigpu_cli.planning.rng_keys import make_key

PERIOD = 65536  # positions, in each of which every source has the same number
_MIX = 0x313C  # separates these random numbers from those of other streams
_ORDERS = 2  # of each source that are kept: the ends of a pass and of the next


class MixtureOrder:
    """The order of a mixture: each source has its share of every epoch, and goes through its samples pass by pass.

    A source takes up where it stopped in the epoch before; when all its samples have had their turn, it shuffles them
    anew. In each period of 65,536 positions, and in the rest at the end, the sources have fixed numbers of places,
    which the seed shuffles.

    Args:
        sizes: samples of each source.
        weights: of each source; its share of the places.
        samples: places in an epoch.
        blocks: of each source, its data.shuffle_block, or None.
        window: data.shuffle_window.

    Attributes:
        counts: places of each source in an epoch.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        samples: int,
        seed: int,
        blocks: Sequence[int | None],
        window: int,
    ) -> None:
        self.sizes, self.samples, self.seed, self.blocks, self.window = list(sizes), samples, seed, blocks, window
        self.periods, rest = divmod(samples, PERIOD)
        self.of_period, self.of_rest = apportion(PERIOD, weights), apportion(rest, weights)
        self.counts = [self.periods * each + left for each, left in zip(self.of_period, self.of_rest, strict=True)]
        self.offsets = [0, *accumulate(sizes)]
        self._orders: list[OrderedDict[int, OrderOfEpoch]] = [OrderedDict() for _ in sizes]

    def __len__(self) -> int:
        return self.samples

    def __call__(self, epoch: int) -> OrderOfEpoch:
        """The numbers of the samples, counted over all sources one after the other.

        A source's second pass within the epoch counts on from the end of all sources, a third from there, and so on.
        """
        return _MixtureEpoch(self, epoch)

    def find_places(self, source: int, first: int, count: int, epoch: int) -> Tensor:
        """(count,) int64: what a source gives from its place `first` on, counted over all epochs."""
        size, total, found = self.sizes[source], self.offsets[-1], []
        began = epoch * self.counts[source] // size  # the pass in which the epoch begins
        while count:
            number, at = divmod(first, size)
            taken = min(count, size - at)
            rows = self._open_pass(source, number)[at : at + taken]
            found.append(rows + (self.offsets[source] + (number - began) * total))
            first, count = first + taken, count - taken
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)

    def _open_pass(self, source: int, number: int) -> OrderOfEpoch:
        kept = self._orders[source]
        if number not in kept:
            seed = make_key(self.seed, _MIX, source)
            kept[number] = shuffle_epoch(self.sizes[source], seed, number, self.blocks[source], self.window)
            if len(kept) > _ORDERS:
                kept.popitem(last=False)
        return kept[number]


class _MixtureEpoch:
    """One epoch of a MixtureOrder, of which slices are asked for."""

    def __init__(self, mixture: MixtureOrder, epoch: int) -> None:
        self._mixture, self._epoch = mixture, epoch
        self._last: tuple[int, Tensor] = -1, torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        return self._mixture.samples

    def __getitem__(self, positions: slice, /) -> Tensor:
        """(n,) int64: the samples at some positions."""
        first, last, step = positions.indices(len(self))
        parts = []
        while first < last:
            number, at = divmod(first, PERIOD)
            parts.append(self._mix_period(number)[at : at + last - first])
            first += len(parts[-1])
        return (torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64))[::step]

    def _mix_period(self, number: int) -> Tensor:
        """The samples of one period in order; the last one asked for is kept."""
        if self._last[0] != number:
            mixture, epoch = self._mixture, self._epoch
            counts = mixture.of_period if number < mixture.periods else mixture.of_rest
            samples = [
                mixture.find_places(
                    source, epoch * mixture.counts[source] + number * mixture.of_period[source], count, epoch
                )
                for source, count in enumerate(counts)
            ]
            generator = torch.Generator().manual_seed(make_key(mixture.seed, epoch, _MIX, number))
            sources = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
            sources = sources[torch.randperm(len(sources), generator=generator)]
            found = torch.empty(len(sources), dtype=torch.int64)
            for source, rows in enumerate(samples):
                found[sources == source] = rows  # in the order of its pass
            self._last = number, found
        return self._last[1]
