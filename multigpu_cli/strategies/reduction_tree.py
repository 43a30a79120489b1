"""One order of summation for any number of workers: a canonical binary tree over the micro-batches of a step.

Leaves are numbered from the left. Two nodes of one level whose numbers are 2k and 2k+1 are buddies and make node k of
the next level; what has no buddy at the end is added from the right. Which additions happen, and in which order,
depends on the number of leaves alone: a worker sums its contiguous block as far as buddies allow, and the same tree
goes on across workers.
"""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

Value = TypeVar("Value")


class Node(NamedTuple, Generic[Value]):
    """The sum of the leaves number·2^level … (number+1)·2^level - 1."""

    level: int
    number: int
    value: Value


class ReductionTree(Generic[Value]):
    """A binary counter: leaves or nodes arrive from left to right, buddies merge at once.

    Args:
        add: left, right → sum; may reuse its left argument.
    """

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
