"""Cascaded LSTMs: what the extractor reads, and who learns how fast."""

from typing import Any

import pytest
import torch

from multigpu_cli.config.schema import OptimizerConfig
from multigpu_cli.environments.base import Box, Discrete
from multigpu_cli.optimizers.build import base_rate, build_optimizer, set_rate
from multigpu_cli.rl.policy import CascadedActorCritic as build
from multigpu_cli.run.request.spec import compute_rate_factors


@pytest.mark.parametrize("shape", [(6, 4), (4,)])
def test_outputs_and_memory(shape: tuple[int, ...]) -> None:
    model: Any = build(shape, 4, Box((2,), -1.0, 1.0), features=8, hidden=5)
    memory = torch.randn(3, model.memory_size)
    outputs, values, after = model(torch.randn(7, 3, *shape), torch.zeros(7, 3), memory)
    assert (outputs.shape, values.shape, after.shape) == ((7, 3, 4), (7, 3), (3, 20))


def test_the_extractor_reads_the_whole_window_and_actor_and_critic_remember_for_themselves() -> None:
    model = build((6, 4), 3, Discrete(3), features=8, hidden=5)
    observations = torch.randn(1, 2, 6, 4, requires_grad=True)
    memory = torch.randn(2, 20, requires_grad=True)
    outputs, values, _ = model(observations, torch.zeros(1, 2), memory)
    outputs[0, 0].sum().backward(retain_graph=True)
    assert observations.grad is not None
    assert memory.grad is not None
    assert bool((observations.grad[0, 0].abs().sum(1) > 0).all()), "from its oldest day on"
    assert not observations.grad[0, 1].any()
    assert bool(memory.grad[0, :10].any())
    assert not memory.grad[0, 10:].any()
    memory.grad.zero_()
    values[0, 0].backward()
    assert not memory.grad[0, :10].any()
    assert bool(memory.grad[0, 10:].any())


def test_the_extractor_may_learn_more_slowly() -> None:
    model: Any = build((6, 4), 3, Discrete(3), features=8, hidden=5, extractor_rate=0.25)
    config = OptimizerConfig()
    optimizer = build_optimizer(model, config, compute_rate_factors(model, config))
    set_rate(optimizer, 0.1)
    extractor = {id(parameter) for parameter in model.extractor.parameters()}
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert {rate for p, rate in rates.items() if p in extractor} == {0.025}
    assert {rate for p, rate in rates.items() if p not in extractor} == {0.1}
    assert base_rate(optimizer) == 0.1, "the one that the journal shows"
