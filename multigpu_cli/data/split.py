"""Divides samples into training, validation and test parts by seed."""

import torch
from torch import Tensor

from multigpu_cli.errors import RequestError, pluralize
from multigpu_cli.planning.rng_keys import make_key

_SPLIT = 0x5917  # separates the split's random stream from the epochs' orders


def shuffle_indices(count: int, seed: int) -> Tensor:
    """(count,) int64: the numbers 0 … count-1 in an order that depends only on the seed."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(make_key(seed, _SPLIT)))


def split_by_sample(count: int, fractions: tuple[float, ...], seed: int) -> list[Tensor]:
    """Index tensors of consecutive parts of a shuffled dataset; the first part has the remainder.

    Args:
        count: number of samples.
        fractions: shares of the parts after the first, e.g. (0.1, 0.1) for 80/10/10.
    """
    sizes = [round(count * fraction) for fraction in fractions]
    first = count - sum(sizes)
    if first < 1 or any(size < 1 for size in sizes):
        raise RequestError(
            f"--data: {pluralize(count, 'sample')} can't be divided into {len(sizes) + 1} parts",
            remedy="use more samples, or a dataset with its own train, val and test splits",
        )
    return list(torch.split(shuffle_indices(count, seed), [first, *sizes]))


def split_by_group(groups: Tensor, val_groups: int, seed: int) -> tuple[Tensor, Tensor]:
    """(training, validation) sample indices such that no group (a subject, a recording) is in both.

    Args:
        groups: (n,) the group of each sample.
        val_groups: number of groups for validation, chosen by seed.
    """
    names = groups.unique()
    if not 0 < val_groups < len(names):
        raise RequestError(
            f"--data: {val_groups} of {len(names)} groups can't be used for validation",
            remedy=f"use at least 1 and at most {len(names) - 1}",
        )
    chosen = names[shuffle_indices(len(names), seed)[:val_groups]]
    held_out = torch.isin(groups, chosen)
    return torch.nonzero(~held_out).flatten(), torch.nonzero(held_out).flatten()
