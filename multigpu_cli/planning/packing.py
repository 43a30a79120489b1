"""Packs samples of different lengths into rows of a fixed capacity: first-fit decreasing."""

from array import array
from collections.abc import Iterable, Iterator, Sequence

WINDOW = 1024
"""Samples that are packed among themselves, so that an epoch's packs follow the epoch's order."""


def pack_windows(
    order: Sequence[int], lengths: Sequence[int], capacity: int, window: int = WINDOW
) -> Iterator[list[int]]:
    """The samples of each pack in turn: each window of the order is packed by itself.

    Args:
        order: samples, as an epoch has them.
        lengths: tokens of each sample, from 1 to the capacity.
        capacity: tokens of a pack.
        window: samples that are packed among themselves.
    """
    for start in range(0, len(order), window):
        yield from pack_first_fit(order[start : start + window], lengths, capacity)


def pack_first_fit(samples: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """First-fit decreasing (Johnson 1973): the longest first, each into the first pack that has room for it.

    At most 11/9 of the fewest packs possible, plus one. Samples of one length stay in their order.
    """
    ranked = sorted(samples, key=lambda sample: -lengths[sample])
    packs: list[list[int]] = []
    for sample, place in zip(ranked, _place(map(lengths.__getitem__, ranked), len(ranked), capacity), strict=True):
        if place == len(packs):
            packs.append([])
        packs[place].append(sample)
    return packs


def count_first_fit(descending: Sequence[int], capacity: int) -> int:
    """The number of packs of `pack_first_fit`, which depends on the lengths alone.

    Args:
        descending: lengths of all samples, the longest first.
    """
    return 1 + max(_place(descending, len(descending), capacity), default=-1)


def _place(descending: Iterable[int], count: int, capacity: int) -> Iterator[int]:
    """The number of the pack of each of `count` samples."""
    room = _Room(count, capacity)
    return map(room.take, descending)


class _Room:
    """The room left in each of `count` packs, as a tree of maxima: the first with enough of it is found in log2 steps.

    Args:
        count: more packs are never needed.
    """

    def __init__(self, count: int, capacity: int) -> None:
        self._leaves = 1 << max(0, count - 1).bit_length()
        self._most = array("q", [capacity]) * (2 * self._leaves)

    def take(self, length: int) -> int:
        """The first pack with room for `length`, which it then has no more."""
        node = 1
        while node < self._leaves:
            node *= 2
            node += self._most[node] < length
        place = node - self._leaves
        self._most[node] -= length
        while node > 1:
            node //= 2
            self._most[node] = max(self._most[2 * node], self._most[2 * node + 1])
        return place
