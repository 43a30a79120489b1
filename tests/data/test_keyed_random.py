import pytest
import torch

from multigpu_cli.data.order import KeyedRandom, _mix_bits
from multigpu_cli.planning.batch import make_key


def numbers(seed=1, epoch=0, indices=range(2000), stream=0, count=1):
    return KeyedRandom(seed, epoch, torch.tensor(list(indices))).uniform(stream, count)


def test_a_samples_numbers_do_not_depend_on_its_batch():
    assert torch.equal(numbers(indices=[5, 3, 900], count=3), numbers(count=3)[[5, 3, 900]])


@pytest.mark.parametrize("other", [{"seed": 2}, {"epoch": 1}, {"stream": 1}, {"indices": range(2000, 4000)}])
def test_seed_epoch_stream_and_sample_each_give_other_numbers(other):
    first, second = numbers(), numbers(**other)
    assert (first == second).float().mean() < 0.01
    assert abs(torch.corrcoef(torch.stack([first[:, 0], second[:, 0]]))[0, 1]) < 0.1


def test_they_are_uniform():
    drawn = numbers(count=5)
    assert drawn.dtype == torch.float32
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert (torch.histc(drawn, bins=10, min=0, max=1) / drawn.numel() - 0.1).abs().max() < 0.02
    assert abs(torch.corrcoef(drawn.T) - torch.eye(5)).max() < 0.1


def test_splitmix64_gives_its_published_numbers():
    """The first outputs for seed 1234567, as in the reference implementation (Vigna, splitmix64.c)."""
    states = [(1234567 + 0x9E3779B97F4A7C15 * at + 2**63) % 2**64 - 2**63 for at in range(3)]  # as int64
    found = [number % 2**64 for number in _mix_bits(torch.tensor(states)).tolist()]
    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_the_mixing_is_that_of_planning_keys():
    words = torch.tensor([0, 1, -1, 2**62, 123456789, -(2**63)])
    keys = [number % 2**64 >> 1 for number in _mix_bits(_mix_bits(words)).tolist()]
    assert keys == [make_key(word) for word in words.tolist()]
