"""Weights for use beside those that take steps; against the averages of the paper, by hand."""

import torch
from torch import nn

from multigpu_cli.optimizers.eval_weights import eval_weights, is_schedule_free
from tests.support.optimizers import ScheduleFreeSGD


def after_steps(count: int) -> tuple[ScheduleFreeSGD, nn.Parameter, list[torch.Tensor]]:
    """The optimizer of one weight after some steps, and the z of each step."""
    weight = nn.Parameter(torch.linspace(-2, 1, 101))  # of two, none would be rounded
    optimizer = ScheduleFreeSGD([weight], lr=0.1)
    optimizer.train()
    seen = []
    for number in range(count):
        weight.grad = weight.detach() * (number + 1) / 3
        optimizer.step()
        seen.append(optimizer.state[weight]["z"].clone())
    return optimizer, weight, seen


def test_the_weights_for_use_are_the_mean_of_all_steps() -> None:
    """With a constant rate: Defazio et al. 2024, equation 5."""
    optimizer, weight, seen = after_steps(5)
    with eval_weights(optimizer):
        assert torch.allclose(weight, torch.stack(seen).mean(0), atol=1e-6)


def test_afterwards_the_weights_have_their_own_bits_again() -> None:
    undisturbed, often = after_steps(3), after_steps(3)
    rounded = often[1].detach().clone()
    for _ in range(7):
        with eval_weights(often[0]):
            assert not often[0].param_groups[0]["train_mode"]
    assert torch.equal(undisturbed[1], often[1])
    assert torch.equal(rounded, often[1])
    assert often[0].param_groups[0]["train_mode"]


def test_other_optimizers_have_one_kind_of_weights() -> None:
    weight = nn.Parameter(torch.ones(2))
    plain = torch.optim.SGD([weight], lr=0.1)
    assert not is_schedule_free(plain)
    with eval_weights(plain):
        pass
    assert torch.equal(weight, torch.ones(2))
