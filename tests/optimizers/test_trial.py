"""What is found out about an optimizer before a run."""

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from multigpu_cli.config.schema import OptimizerConfig
from multigpu_cli.errors import RequestError
from multigpu_cli.optimizers.build import build_optimizer, construct_optimizer
from multigpu_cli.optimizers.eval_weights import is_schedule_free
from multigpu_cli.optimizers.trial import check_optimizer, rehearse_step
from multigpu_cli.planning.schedule import OPTIMIZERS

OWN = "tests.support.optimizers:"


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 2))


def check(name: str, *, exact: bool = True, **args: Any) -> torch.optim.Optimizer:
    config = OptimizerConfig(name=name, args=args)
    optimizer = build_optimizer(network(), config, rate=0.1)
    check_optimizer(optimizer, partial(construct_optimizer, config, rate=0.1), name, exact=exact)
    return optimizer


@pytest.mark.parametrize("name", [*OPTIMIZERS, f"{OWN}ScheduleFreeSGD", f"{OWN}Manifold"])
def test_these_are_deterministic_and_can_be_resumed(name: str) -> None:
    if name == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    check(name)


def test_the_trial_leaves_nothing_behind() -> None:
    config = OptimizerConfig(name=f"{OWN}Noisy")
    optimizer = build_optimizer(network(), config, rate=0.1)
    before = torch.get_rng_state()
    check_optimizer(optimizer, partial(construct_optimizer, config, rate=0.1), config.name, exact=False)
    assert torch.equal(torch.get_rng_state(), before)
    assert not optimizer.state
    assert all(group["lr"] == 0 for group in optimizer.param_groups)


def test_what_is_not_deterministic_is_refused_only_with_exact() -> None:
    check(f"{OWN}Clocked", exact=False)
    with pytest.raises(RequestError, match=f"--exact: --optimizer {OWN}Clocked is not deterministic"):
        check(f"{OWN}Clocked")


def test_random_numbers_are_those_of_the_step() -> None:
    check(f"{OWN}Noisy")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Forgetful", "after its state was saved and loaded gives other bits"),
        ("Pickled", r"a checkpoint can't hold its state"),
        ("Closing", "its step on small weights raised TypeError: .*closure"),
    ],
)
def test_what_could_not_be_resumed_or_stepped_is_refused(name: str, told: str) -> None:
    with pytest.raises(RequestError, match=told):
        check(OWN + name, exact=False)


REHEARSED = [name for name in OPTIMIZERS if name not in ("sgd", "adagrad")]  # these are made with a state


@pytest.mark.parametrize("name", [*REHEARSED, f"{OWN}ScheduleFreeSGD"])  # which counts its steps in its groups
def test_a_rehearsed_step_moves_nothing(name: str) -> None:
    """And it is a step, which allocates what the first one will."""
    if name == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    model = network()
    optimizer = build_optimizer(model, OptimizerConfig(name=name, weight_decay=0.1), rate=0.1)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    model(torch.randn(3, 6)).sum().backward()
    if is_schedule_free(optimizer):
        optimizer.train()  # type: ignore[attr-defined]
    else:
        next(model.parameters()).data[0, 0] = -0.0
    before, groups = [parameter.detach().clone() for parameter in model.parameters()], deepcopy(describe(optimizer))
    rehearse_step(optimizer)
    for was, parameter in zip(before, model.parameters(), strict=True):
        assert torch.equal(was.view(torch.int32), parameter.detach().view(torch.int32))
    assert not optimizer.state
    assert describe(optimizer) == groups


def describe(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [group | {"params": len(group["params"])} for group in optimizer.param_groups]
