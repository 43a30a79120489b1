"""The canonical sum: the same additions in the same order, however the leaves are dealt to workers."""

import struct
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from multigpu_cli.strategies.exact import Node, ReductionTree, cover

LEAVES = range(1, 18)


def wild(count: int, seed: int) -> list[float]:
    """Numbers of all sizes and both signs, whose sum depends on the order of additions."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-20, 20, (count,), generator=generator)
    return torch.ldexp(torch.randn(count, generator=generator, dtype=torch.float64), exponents).tolist()


def by_definition(leaves: list[float], level: int | None = None, number: int = 0) -> float:
    """Node `number` of a level of the tree over all leaves: its left half plus its right half, if that has any."""
    if level is None:
        level = (len(leaves) - 1).bit_length()
    if level == 0:
        return leaves[number]
    left = by_definition(leaves, level - 1, 2 * number)
    right = 2 * number + 1
    return left + by_definition(leaves, level - 1, right) if right << (level - 1) < len(leaves) else left


def sum_over_workers(leaves: list[float], workers: int, add: Callable[[float, float], float]) -> float:
    """The sum as workers with contiguous blocks make it: each its own, then all that is left in rank order."""
    across = ReductionTree(add)
    for rank in range(workers):
        for node in block(leaves, workers, rank, add):
            across.push(*node)
    return across.total()


def block(leaves: list[float], workers: int, rank: int, add: Callable[[float, float], float]) -> list[Node[float]]:
    own = ReductionTree(add)
    count = len(leaves)
    for number in range(count * rank // workers, count * (rank + 1) // workers):
        own.push(0, number, leaves[number])
    return own.nodes


def bits(value: float) -> bytes:
    return struct.pack("d", value)


@pytest.mark.parametrize("count", LEAVES)
def test_any_number_of_workers_gives_the_bits_of_the_definition(count: int) -> None:
    for seed in range(20):
        leaves = wild(count, seed)
        expected = bits(by_definition(leaves))
        for workers in range(1, count + 3):  # two more than there are leaves stay idle
            assert bits(sum_over_workers(leaves, workers, lambda left, right: left + right)) == expected, (
                workers,
                seed,
            )


def test_a_left_fold_has_other_bits() -> None:
    """Or the test above could not fail."""
    differing = [seed for seed in range(20) if bits(sum(wild(8, seed))) != bits(by_definition(wild(8, seed)))]
    assert len(differing) > 5


@given(count=st.integers(1, 200), cuts=st.lists(st.integers(0, 200), max_size=9))
def test_contiguous_blocks_of_any_size_make_one_tree(count: int, cuts: list[int]) -> None:
    """Additions are compared as words: ((0+1)+(2+3))+4."""

    def add(left: str, right: str) -> str:
        return f"({left}+{right})"

    whole, across = ReductionTree(add), ReductionTree(add)
    for leaf in range(count):
        whole.push(0, leaf, str(leaf))
    edges = [0, *sorted(min(cut, count) for cut in cuts), count]
    for first, stop in pairwise(edges):
        own = ReductionTree(add)
        for leaf in range(first, stop):
            own.push(0, leaf, str(leaf))
        assert [node[:2] for node in own.nodes] == cover(first, stop)
        for node in own.nodes:
            across.push(*node)
    assert across.total() == whole.total()


def test_additions_are_those_of_the_definition() -> None:
    tree: ReductionTree[str] = ReductionTree(lambda left, right: f"({left}{right})")
    for leaf in range(7):
        tree.push(0, leaf, str(leaf))
    assert tree.total() == "(((01)(23))((45)6))"
    assert tree.nodes == []


def test_few_nodes_stay_however_many_leaves_there_are() -> None:
    assert max(len(cover(first, first + 64)) for first in range(64)) <= 12
    assert cover(0, 64) == [(6, 0)]
    assert cover(5, 5) == []
