"""Divides rows on a disk into parts without a list of rows: of each ten side by side, the seed draws those held out.

The parts are the same whatever the memory, sorted files give every part its share, and rows that lie side by side in a
part do so on the disk.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from multigpu_cli.errors import RequestError, pluralize
from multigpu_cli.planning.rng_keys import make_key

_GROUP = 10  # rows, of which each held-out part has one
_SPREAD = 0x5B2EAD  # separates this split's random numbers from those of other streams


@dataclass(frozen=True)
class RowSelection:
    """The rows of one part: a function of its arguments, and no list.

    Attributes:
        rows: of the whole store.
        parts: how many parts are held out: 0 where the store is not divided, 1 or 2.
        part: 0 is the training part, which also has what is left over; 1 and 2 are those held out.
        key: of the random numbers.
    """

    rows: int
    parts: int = 0
    part: int = 0
    key: int = 0

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
        mixed = _mix(groups.astype(np.uint64) ^ np.uint64(self.key))
        first = (mixed % np.uint64(_GROUP)).astype(np.int64)
        if self.parts == 1:
            return (first,)
        second = ((mixed >> np.uint64(32)) % np.uint64(_GROUP - 1)).astype(np.int64)
        return first, second + (second >= first)


def divide_rows(rows: int, parts: int, seed: int, where: str) -> list[RowSelection]:
    """The training part, and so many held-out parts of a tenth each.

    Args:
        where: names the rows, for messages.

    Raises:
        RequestError: too few rows.
    """
    if parts and rows < _GROUP:
        raise RequestError(
            f"{where}: {pluralize(rows, 'row')} can't be divided into {parts + 1} parts",
            remedy=f"at least {_GROUP} rows, or parts of your own: train, validation and test",
        )
    key = make_key(seed, _SPREAD) & (2**64 - 1)
    return [RowSelection(rows, parts, part, key) for part in range(parts + 1)]


def _mix(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer (Steele, Lea and Flood 2014): 64 well-mixed bits of each number."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed
