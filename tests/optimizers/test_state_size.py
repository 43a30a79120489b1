"""The bytes of an optimizer's state, measured on small weights, are those that it has on the model."""

import pytest
import torch
from torch import nn

from multigpu_cli.config.schema import OptimizerConfig
from multigpu_cli.optimizers.build import build_optimizer
from multigpu_cli.optimizers.trial import measure_state_bytes

NAMES = ["adamw", "sgd", "rmsprop", "adagrad", "adafactor", "adadelta", "tests.support.optimizers:Manifold"]


@pytest.mark.parametrize("name", NAMES)
def test_it_is_what_a_step_leaves(name: str) -> None:
    model, config = nn.Sequential(nn.Conv2d(2, 8, 3), nn.Linear(30, 9)), OptimizerConfig(name=name)
    optimizer = build_optimizer(model, config, rate=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    leaves = torch.utils._pytree.tree_leaves(list(optimizer.state.values()))
    expected = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim)
    assert measure_state_bytes(model.to("meta"), config) == expected > 0
