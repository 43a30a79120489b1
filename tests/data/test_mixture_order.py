from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multigpu_cli.data import mixture
from multigpu_cli.data.mixture import MixtureOrder


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=4),
    samples=st.integers(10, 150),
    block=st.sampled_from([None, 3]),
    seed=st.integers(0, 99),
)
def test_every_source_goes_through_its_samples_pass_by_pass(
    sizes: list[int], samples: int, block: int | None, seed: int
) -> None:
    weights = [float(1 + at) for at in range(len(sizes))]
    order = MixtureOrder(sizes, weights, samples, seed, [block] * len(sizes), 2)
    epochs = [order(epoch)[:] for epoch in range(4)]
    total, starts = sum(sizes), order.offsets
    for epoch in epochs:
        assert len(epoch.unique()) == len(epoch) == samples, "a number comes once in an epoch"
    drawn = torch.cat(epochs) % total
    for source, size in enumerate(sizes):
        mine = drawn[(drawn >= starts[source]) & (drawn < starts[source + 1])]
        assert len(mine) == 4 * order.counts[source]
        for first in range(0, len(mine) - size + 1, size):
            assert len(mine[first : first + size].unique()) == size, "a pass has each sample once"


def test_a_position_does_not_depend_on_what_was_asked_before() -> None:
    def make() -> MixtureOrder:
        return MixtureOrder([70, 9, 200], [5, 1, 2], 150, 42, [None, None, 8], 3)

    whole = make()(3)[:]
    assert torch.equal(torch.cat([make()(3)[first : first + 7] for first in range(0, 150, 7)]), whole)
    assert not torch.equal(make()(2)[:], whole)


def test_periods_have_the_same_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixture, "PERIOD", 20)
    order = MixtureOrder([1000, 1000], [3, 1], 95, 0, [None, None], 1)
    epoch = order(1)
    for first in range(0, 80, 20):
        assert Counter((epoch[first : first + 20] % 2000 >= 1000).tolist()) == {False: 15, True: 5}
    assert order.counts == [71, 24]
    assert torch.equal(torch.cat([epoch[at : at + 1] for at in range(95)]), epoch[:])


def test_the_golden_order() -> None:
    """A run that was started with an earlier version goes on in the same order."""
    order = MixtureOrder([5, 3], [1, 1], 8, 42, [None, None], 64)
    assert order(0)[:].tolist() == [7, 0, 2, 6, 3, 4, 5, 13]
