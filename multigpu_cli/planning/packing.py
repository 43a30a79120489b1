"""Packs samples of different lengths into rows of a fixed capacity: first-fit decreasing."""

from collections.abc import Sequence

WINDOW = 1024
"""Samples that are packed among themselves, so that an epoch's packs follow the epoch's order."""


def pack_windows(order: Sequence[int], lengths: Sequence[int], capacity: int, window: int = WINDOW) -> list[list[int]]:
    """The samples of each pack: each window of the order is packed by itself.

    Args:
        order: samples, as an epoch has them.
        lengths: tokens of each sample, from 1 to the capacity.
        capacity: tokens of a pack.
        window: samples that are packed among themselves.
    """
    return [
        pack
        for start in range(0, len(order), window)
        for pack in pack_first_fit(order[start : start + window], lengths, capacity)
    ]


def pack_first_fit(samples: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """First-fit decreasing (Johnson 1973): the longest first, each into the first pack that has room for it.

    At most 11/9 of the fewest packs possible, plus one. Samples of one length stay in their order.
    """
    ranked = sorted(samples, key=lambda sample: -lengths[sample])
    room = _Room(len(ranked), capacity)
    packs: list[list[int]] = []
    for sample in ranked:
        place = room.take(lengths[sample])
        if place == len(packs):
            packs.append([])
        packs[place].append(sample)
    return packs


class _Room:
    """The room left in each of `count` packs, as a tree of maxima: the first with enough of it is found in log2 steps.

    Args:
        count: more packs are never needed.
    """

    def __init__(self, count: int, capacity: int) -> None:
        self._leaves = 1 << max(0, count - 1).bit_length()
        self._most = [capacity] * (2 * self._leaves)

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
