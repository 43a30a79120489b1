import pytest
import torch

from multigpu_cli.data.builtin.har import split_by_group
from multigpu_cli.data.order import shuffle_numbers, split_by_sample
from multigpu_cli.errors import RequestError


def test_parts_hold_every_sample_once_in_the_asked_shares():
    parts = split_by_sample(1003, (0.1, 0.2), seed=1)
    assert [len(part) for part in parts] == [702, 100, 201]
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(1003))


def test_the_split_depends_on_the_seed_alone():
    torch.manual_seed(5)
    first = split_by_sample(100, (0.1,), seed=1)
    torch.manual_seed(6)
    assert all(torch.equal(a, b) for a, b in zip(first, split_by_sample(100, (0.1,), seed=1), strict=True))
    assert not torch.equal(first[0], split_by_sample(100, (0.1,), seed=2)[0])
    assert not torch.equal(shuffle_numbers(100, 1), torch.arange(100))


@pytest.mark.parametrize(("count", "fractions"), [(3, (0.1,)), (10, (0.5, 0.5)), (10, (1.2,))])
def test_a_part_without_samples_is_refused(count, fractions):
    with pytest.raises(RequestError, match="can't be divided"):
        split_by_sample(count, fractions, seed=1)


def test_no_group_is_on_both_sides_and_samples_keep_their_order():
    groups = torch.tensor([3, 1, 1, 7, 3, 9, 7, 1])
    train, val = split_by_group(groups, 2, seed=4)
    assert not set(groups[train].tolist()) & set(groups[val].tolist())
    assert len(groups[val].unique()) == 2
    assert torch.equal(torch.cat([train, val]).sort().values, torch.arange(8))
    assert torch.equal(train, train.sort().values)


def test_another_seed_holds_out_other_groups():
    groups = torch.arange(20).repeat_interleave(3)
    assert len({tuple(split_by_group(groups, 4, seed)[1].tolist()) for seed in range(5)}) == 5


@pytest.mark.parametrize("held_out", [0, 3, 4])
def test_no_group_or_all_groups_for_validation_are_refused(held_out):
    with pytest.raises(RequestError, match=f"{held_out} of 3 groups"):
        split_by_group(torch.tensor([1, 2, 3]), held_out, seed=1)
