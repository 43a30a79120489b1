import pytest
import torch

from multigpu_cli.data.order import KeyedRandom
from multigpu_cli.planning.batch import mix_bits


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


def test_the_mixing_is_that_of_planning_keys():
    from multigpu_cli.data.order import _mix_bits

    words = [0, 1, -1, 2**62, 123456789, -(2**63)]
    assert [number % 2**64 for number in _mix_bits(torch.tensor(words)).tolist()] == [
        mix_bits(word % 2**64) for word in words
    ]
