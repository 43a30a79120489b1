"""The fused AdamW beside torch's: the same bits, whatever changes between two steps."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from multigpu_cli.optimizers.fused import AdamW

Change = Callable[[nn.Module, torch.optim.Optimizer], None]


def train(kind: type[torch.optim.AdamW], change: Change | None = None) -> tuple[list[Any], torch.optim.Optimizer]:
    """Three steps, the change, three more; all weights and states."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2).double(), nn.Linear(3, 1))
    groups: list[dict[str, Any]] = [
        {"params": [*model[0].parameters(), *model[1].parameters()]},
        {"params": [model[2].weight], "lr": 0.1},
    ]
    optimizer = kind(groups, lr=0.01, weight_decay=0.3, fused=True)
    for step in range(6):
        if step == 3 and change is not None:
            change(model, optimizer)
        parts = (model[1](model[0](torch.ones(3) * step).double()).sum(), model[2](torch.ones(3)).sum())
        sum(part**2 for part in parts if part.requires_grad).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"] if p in optimizer.state]
    return [*(p.detach() for p in model.parameters()), *(value for each in state for value in each.values())], optimizer


def load_other_state(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = deepcopy(optimizer.state_dict())
    for number in state["state"]:
        state["state"][number]["exp_avg"] *= 2
    optimizer.load_state_dict(state)


def replace_a_tensor(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[model[0].weight]["exp_avg_sq"] = torch.ones(4, 3)  # type: ignore[index]


def replace_the_list(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"] = list(model[0].parameters())  # type: ignore[index]


CHANGES: dict[str, Change] = {
    "nothing": lambda model, optimizer: None,
    "freeze": lambda model, optimizer: model[0].requires_grad_(requires_grad=False),  # type: ignore[index]
    "freeze a group": lambda model, optimizer: model[2].requires_grad_(requires_grad=False),  # type: ignore[index]
    "another rate": lambda model, optimizer: optimizer.param_groups[1].update(lr=0.5, betas=(0.5, 0.6)),
    "maximize": lambda model, optimizer: optimizer.load_state_dict(
        optimizer.state_dict()
        | {"param_groups": [group | {"maximize": True} for group in optimizer.state_dict()["param_groups"]]}
    ),
    "a new group": lambda model, optimizer: optimizer.add_param_group({"params": [model[2].bias], "lr": 0.2}),  # type: ignore[index]
    "a loaded state": load_other_state,
    "another tensor": replace_a_tensor,
    "a shorter list": replace_the_list,
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_bits_are_torchs_whatever_changes_between_two_steps(name: str) -> None:
    ours, theirs = train(AdamW, CHANGES[name])[0], train(torch.optim.AdamW, CHANGES[name])[0]
    assert len(ours) == len(theirs)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    if name != "nothing":
        assert any(not torch.equal(one, other) for one, other in zip(ours, train(AdamW)[0], strict=False))


def test_a_parameter_that_gets_its_first_gradient_late_is_moved_from_then_on() -> None:
    def train_late(kind: type[torch.optim.AdamW]) -> torch.Tensor:
        weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
        optimizer = kind(weights, lr=0.1, fused=True)
        for step in range(6):
            for weight in weights[: 1 + step // 3]:
                weight.grad = torch.ones(3)
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([weight.detach() for weight in weights])

    assert torch.equal(train_late(AdamW), train_late(torch.optim.AdamW))


def test_hooks_are_called_and_the_profiler_sees_the_step() -> None:
    weight, called = nn.Parameter(torch.ones(3)), []
    optimizer = AdamW([weight], fused=True)
    for _ in range(3):
        weight.grad = torch.ones(3)
        optimizer.step()
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    optimizer.step()
    assert called == ["before", "after"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    assert "Optimizer.step#AdamW.step" in {event.key for event in profile.key_averages()}
    assert torch.is_grad_enabled()
    assert optimizer.state[weight]["step"] == 5
