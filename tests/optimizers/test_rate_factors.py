"""What the rate of each parameter is multiplied by, and the groups that the optimizer makes of it."""

from itertools import pairwise
from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from multigpu_cli.config.schema import OptimizerConfig
from multigpu_cli.errors import RequestError
from multigpu_cli.optimizers.build import base_rate, build_optimizer, set_rate
from multigpu_cli.planning.schedule import decay_by_depth
from multigpu_cli.run.request.spec import compute_rate_factors


def network() -> nn.Module:
    blocks = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    return nn.ModuleDict({"stem": nn.Linear(2, 4), "blocks": blocks, "norm": nn.LayerNorm(4), "head": nn.Linear(4, 3)})


def factors(model: nn.Module | None = None, **settings: object) -> dict[str, float]:
    return compute_rate_factors(model or network(), OptimizerConfig(**settings))  # type: ignore[arg-type]


def test_without_settings_every_rate_is_the_schedules() -> None:
    assert set(factors().values()) == {1.0}


def test_every_pattern_that_matches_multiplies() -> None:
    found = factors(rates={"head.*": 10.0, "*.bias": 0.5})
    assert found["head.weight"] == 10
    assert found["head.bias"] == 5
    assert found["stem.bias"] == 0.5
    assert found["stem.weight"] == 1


@given(st.permutations([("*", 0.1), ("*.weight", 0.3), ("head.*", 7.0), ("h*", 1.1)]))
def test_the_order_of_patterns_changes_no_bit(pairs: list[tuple[str, float]]) -> None:
    assert factors(rates=dict(pairs)) == factors(rates=dict(sorted(pairs)))


def test_layers_decay_from_the_head_to_the_embedding() -> None:
    found = factors(layer_decay=0.5)
    assert found["head.weight"] == found["norm.bias"] == 1
    assert [found[f"blocks.{number}.weight"] for number in range(3)] == [0.125, 0.25, 0.5]
    assert found["stem.bias"] == 0.0625
    assert factors(layer_decay=0.5, rates={"head.*": 10.0})["head.bias"] == 10


@given(st.floats(0.1, 1), st.integers(0, 100))
def test_each_block_learns_at_one_share_of_the_next_ones_rate(decay: float, deepest: int) -> None:
    rates = [decay_by_depth(decay, depth, deepest) for depth in range(deepest + 1)]
    assert rates[-1] == 1
    assert all(isclose(one, decay * other) for one, other in pairwise(rates))
    assert all(0 < rate <= 1 for rate in rates)


def test_frozen_parameters_have_no_rate() -> None:
    model = network()
    model.get_submodule("stem").requires_grad_(False)
    assert set(factors(model)) == {name for name, _ in model.named_parameters() if not name.startswith("stem")}
    with pytest.raises(RequestError, match=r"optimizer\.rates 'stem\.\*' matches no parameter that learns"):
        factors(model, rates={"stem.*": 2.0})


def test_a_pattern_that_matches_nothing_names_near_names() -> None:
    with pytest.raises(RequestError, match=r"optimizer\.rates 'haed\.\*'") as refused:
        factors(rates={"haed.*": 2.0})
    assert "head.bias" in refused.value.remedy


def test_a_network_without_blocks_has_no_layers_to_decay() -> None:
    with pytest.raises(RequestError, match=r"optimizer\.layer_decay 0\.5: the model has no repeated blocks"):
        factors(nn.Linear(2, 2), layer_decay=0.5)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_groups_without_factors_are_those_of_old_checkpoints(name: str) -> None:
    """First the matrices, then the others, each in the order of the network."""
    model, config = network(), OptimizerConfig(name=name)
    built, plain = build_optimizer(model, config, factors(model)), build_optimizer(model, config)
    assert built.state_dict()["param_groups"] == plain.state_dict()["param_groups"]
    assert [p.ndim for group in built.param_groups for p in group["params"]] == [2] * 5 + [1] * 7


def test_each_group_moves_at_its_share_of_the_schedules_rate() -> None:
    model, config = network(), OptimizerConfig(rates={"head.*": 10.0}, layer_decay=0.5)
    optimizer = build_optimizer(model, config, compute_rate_factors(model, config))
    set_rate(optimizer, 0.01)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    rates = {names[id(p)]: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert rates == {name: 0.01 * factor for name, factor in compute_rate_factors(model, config).items()}
    assert base_rate(optimizer) == pytest.approx(0.01)
    decays = {names[id(p)]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert all((decay > 0) == name.endswith("weight") for name, decay in decays.items() if "norm" not in name)
