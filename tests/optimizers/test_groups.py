"""Which parameters are in which group: the usual rule, and optimizer.groups."""

from typing import Any

import pytest
from torch import nn

from multigpu_cli.config.schema import OptimizerConfig
from multigpu_cli.errors import RequestError
from multigpu_cli.optimizers.build import build_optimizer, set_rate
from multigpu_cli.run.request.spec import compute_rate_factors


def network() -> nn.Module:
    return nn.ModuleDict({"stem": nn.Linear(2, 4), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 3)})


def settle(*groups: dict[str, Any], **more: Any) -> dict[str, tuple[float, float]]:
    """Name of each parameter → its weight decay, and its rate where the schedule's is 1."""
    model, config = network(), OptimizerConfig(groups=groups, weight_decay=0.1, **more)
    optimizer = build_optimizer(model, config, compute_rate_factors(model, config))
    set_rate(optimizer, 1.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    of = {names[id(p)]: group for group in optimizer.param_groups for p in group["params"]}
    assert sorted(of) == sorted(names.values()), "each in one group"
    return {name: (group["weight_decay"], group["lr"]) for name, group in of.items()}


def test_what_a_pattern_matches_has_its_own_decay_and_rate() -> None:
    found = settle({"match": "*.bias", "lr_factor": 0.1}, {"match": "stem.*", "weight_decay": 0.5})
    assert found["stem.bias"] == (0.5, 0.1)
    assert found["head.bias"] == (0.0, 0.1)
    assert found["stem.weight"] == (0.5, 1.0)
    assert found["head.weight"] == (0.1, 1.0)
    assert found["norm.weight"] == (0.0, 1.0)


def test_of_several_decays_the_last_counts_and_factors_multiply() -> None:
    groups = {"match": "head.*", "weight_decay": 0.5, "lr_factor": 2.0}, {"match": "*.weight", "weight_decay": 0.0}
    assert settle(*groups, rates={"head.weight": 3.0})["head.weight"] == (0.0, 6.0)


def test_a_pattern_without_a_match_names_some_that_there_are() -> None:
    with pytest.raises(RequestError, match=r"optimizer\.groups 'haed\.\*' matches no parameter") as refused:
        settle({"match": "haed.*", "weight_decay": 0.0})
    assert "head.bias" in refused.value.remedy
