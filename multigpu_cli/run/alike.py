"""Whether all nodes have the same data: each has a copy of its own, and a step takes its samples from all of them."""

from collections import Counter
from collections.abc import Sequence

import torch

from multigpu_cli.data.base import Source
from multigpu_cli.data.mark import Mark, differences
from multigpu_cli.errors import RequestError, counted
from multigpu_cli.runtime.collectives import gathered
from multigpu_cli.runtime.world import World


def check_same_data(world: World, source: Source, mark: Mark, name: str) -> None:
    """Compare a mark of the data over all ranks.

    Raises:
        RequestError: some differ; names their nodes. The same on every rank.
    """
    exact, sums = mark
    lengths = [0 if split is None else len(split) for split in (source.train, source.val, source.test)]  # type: ignore[arg-type]
    whole = torch.tensor([*exact, source.samples, *lengths], dtype=torch.int64, device=world.device)
    rough = torch.tensor(sums, dtype=torch.float64, device=world.device)
    marks = [list(map(int, each.tolist())) for each in gathered(world, whole)]
    numbers = [each.tolist() for each in gathered(world, rough)]
    groups = grouped(marks, numbers)
    if len(set(groups)) > 1:
        raise _differing(world, groups, marks, name)


def grouped(marks: Sequence[Sequence[int]], sums: Sequence[Sequence[float]]) -> list[int]:
    """For each rank, the first rank whose data are the same."""
    return [
        next(
            first
            for first in range(rank + 1)
            if list(marks[first]) == list(marks[rank])
            and not differences((marks[first], sums[first]), (marks[rank], sums[rank]))
        )
        for rank in range(len(marks))
    ]


def _differing(world: World, groups: Sequence[int], marks: Sequence[Sequence[int]], name: str) -> RequestError:
    """Who has other data than most; where neither is most, other than rank 0."""
    times = Counter(groups)
    usual = max(times, key=lambda group: (times[group], -group))
    odd = [rank for rank, group in enumerate(groups) if group != usual]
    hosts = list(dict.fromkeys(world.hosts[rank] for rank in odd)) if len(set(world.hosts)) > 1 else []
    whole = [rank for rank in range(world.size) if world.hosts and world.hosts[rank] in hosts] == odd
    ranks = f"rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd[:8]))}{' …' if odd[8:] else ''}"
    who = f"{', '.join(hosts)} ({ranks})" if hosts and whole else ranks
    here, there = marks[usual][4:], marks[odd[0]][4:]
    what = f"{counted(there[0], 'training sample')} instead of {here[0]:,}" if here[0] != there[0] else "other contents"
    if here[0] == there[0] and here != there:
        what = f"{there[1]:,}, {there[2]:,} and {there[3]:,} samples to train, validate and test on "
        what += f"instead of {here[1]:,}, {here[2]:,} and {here[3]:,}"
    error = RequestError(
        f"--data {name}: {who} and the others see different data: {what}",
        remedy="the same files on every node, and the whole dataset on every rank: samples are shared out here",
    )
    error.shared = True
    return error
