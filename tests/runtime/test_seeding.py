import random

import numpy
import pytest
import torch

from multigpu_cli.runtime.seeding import seed_everything, seed_micro_batch, seed_weights
from tests.support.world import CPU


def draw_numbers() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def test_all_three_generators_follow_the_seed() -> None:
    seed_everything(7)
    first = draw_numbers()
    seed_everything(8)
    other = draw_numbers()
    seed_everything(7)
    assert draw_numbers() == first
    assert all(one != two for one, two in zip(first, other, strict=True))


@pytest.mark.parametrize("built", [True, False])
def test_gpus_are_seeded_too_where_torch_has_cuda(built: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = list[int]()
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    seed_everything(7)
    assert seeds == [7] * built


def test_a_seed_may_have_63_bits() -> None:
    seed_everything(2**63 - 1)


def test_weights_have_a_stream_of_their_own() -> None:
    seed_weights(42)
    weights = torch.rand(5)
    seed_micro_batch(42, 0, 0, CPU)
    assert not torch.equal(torch.rand(5), weights)
    seed_weights(42)
    assert torch.equal(torch.rand(5), weights)


def test_each_micro_batch_has_its_own_numbers_whoever_runs_it() -> None:
    found = {}
    for seed in (1, 2):
        for step in range(3):
            for index in range(3):
                seed_micro_batch(seed, step, index, CPU)
                found[seed, step, index] = draw_numbers()
    for generator in range(3):
        assert len({numbers[generator] for numbers in found.values()}) == 18
    draw_numbers()  # whatever was drawn in between
    seed_micro_batch(1, 2, 1, CPU)
    assert draw_numbers() == found[1, 2, 1]


def test_devices_that_share_a_pass_are_seeded_each_and_draw_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """DataParallel's replicas drop units at random, each by the generator of its own GPU."""
    generators = tuple(torch.Generator() for _ in range(3))
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    both = torch.device("cuda", 2), torch.device("cuda", 0)
    found = []
    for step in (1, 2, 1):
        seed_micro_batch(42, step, 0, *both)
        found.append([int(torch.randint(1 << 40, (), generator=generators[number])) for number in (2, 0)])
    assert found[0] == found[2]
    assert len({number for pair in found for number in pair}) == 4
    first = generators[2].initial_seed()
    seed_micro_batch(42, 1, 0, both[0])
    assert generators[2].initial_seed() == first, "the first one draws what it draws alone"
