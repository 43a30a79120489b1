"""Checks that all ranks have the same data and, with --exact, the same kind of machine."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from multigpu_cli.data.data_source import DataSource
from multigpu_cli.data.fingerprint import DataFingerprint, describe_differences
from multigpu_cli.errors import RequestError, pluralize
from multigpu_cli.runtime.collectives import all_gather, all_gather_object
from multigpu_cli.runtime.world import World


def check_same_data(world: World, source: DataSource, fingerprint: DataFingerprint, name: str) -> None:
    """Compare the fingerprint of the data over all ranks.

    Raises:
        RequestError: some differ; names their nodes. The same on every rank.
    """
    exact, sums = fingerprint
    lengths = [0 if split is None else len(split) for split in (source.train, source.val, source.test)]  # type: ignore[arg-type]
    whole = torch.tensor([*exact, source.num_train_samples, *lengths], dtype=torch.int64, device=world.device)
    rough = torch.tensor(sums, dtype=torch.float64, device=world.device)
    marks = [list(map(int, each.tolist())) for each in all_gather(world, whole)]
    numbers = [each.tolist() for each in all_gather(world, rough)]
    groups = group_ranks(marks, numbers)
    if len(set(groups)) > 1:
        raise _describe_difference(world, groups, marks, name)


def check_same_machine(world: World, pinned: Mapping[str, Any]) -> None:
    """Compare over all ranks the facts of the machine on which the bits of a result depend, for --exact.

    Raises:
        RequestError: some differ; names them. The same on every rank.
    """
    first, *others = every = all_gather_object(world, {name: str(value) for name, value in pinned.items()})
    name = next((name for name in first if any(each[name] != first[name] for each in others)), None)
    if name is None:
        return
    odd = [rank for rank, each in enumerate(every) if each[name] != first[name]]
    error = RequestError(
        f"--exact: {_list_ranks(odd)} would train with {name} {every[odd[0]][name]}, "
        f"rank 0 with {first[name]}: bits would differ",
        remedy="machines and GPUs of one kind, or leave out --exact",
    )
    error.shared = True
    raise error


def group_ranks(marks: Sequence[Sequence[int]], sums: Sequence[Sequence[float]]) -> list[int]:
    """For each rank, the first rank whose data are the same."""
    return [
        next(
            first
            for first in range(rank + 1)
            if list(marks[first]) == list(marks[rank])
            and not describe_differences((marks[first], sums[first]), (marks[rank], sums[rank]))
        )
        for rank in range(len(marks))
    ]


def _describe_difference(
    world: World, groups: Sequence[int], marks: Sequence[Sequence[int]], name: str
) -> RequestError:
    """The error that names the ranks whose data differ from the majority's, or from rank 0's if there is none."""
    times = Counter(groups)
    usual = max(times, key=lambda group: (times[group], -group))
    odd = [rank for rank, group in enumerate(groups) if group != usual]
    hosts = list(dict.fromkeys(world.hosts[rank] for rank in odd)) if len(set(world.hosts)) > 1 else []
    whole = [rank for rank in range(world.size) if world.hosts and world.hosts[rank] in hosts] == odd
    who = f"{', '.join(hosts)} ({_list_ranks(odd)})" if hosts and whole else _list_ranks(odd)
    here, there = marks[usual][4:], marks[odd[0]][4:]
    what = (
        f"{pluralize(there[0], 'training sample')} instead of {here[0]:,}" if here[0] != there[0] else "other contents"
    )
    if here[0] == there[0] and here != there:
        what = f"{there[1]:,}, {there[2]:,} and {there[3]:,} samples to train, validate and test on "
        what += f"instead of {here[1]:,}, {here[2]:,} and {here[3]:,}"
    error = RequestError(
        f"--data {name}: {who} and the others see different data: {what}",
        remedy="the same files on every node, and the whole dataset on every rank: the trainer divides it",
    )
    error.shared = True
    return error


def _list_ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:8]))}{' …' if numbers[8:] else ''}"
