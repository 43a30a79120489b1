"""Advantages against plain loops in float64 that follow the definition."""

from typing import Any

import pytest
import torch
from torch import Tensor

from multigpu_cli.rl.objective import PPOSettings, Rollout, advantages

GAMMA, LAMBDA = 0.97, 0.9


def story(steps: int = 40, size: int = 5, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    draws = torch.Generator().manual_seed(3)
    ends = torch.rand(2, steps, size, generator=draws) < 0.1
    numbers = torch.randn(3, steps, size, generator=draws, dtype=torch.float64).to(dtype)
    after = torch.randn(size, generator=draws, dtype=torch.float64).to(dtype)
    names = {"rewards": numbers[0], "values": numbers[1], "cut_values": numbers[2], "after": after}
    return names | {"terminated": ends[0], "truncated": ends[1]}


def compute_advantages(told: dict[str, Any], gamma: float, gae_lambda: float) -> Tensor:
    unused = dict.fromkeys(("observations", "begun", "actions", "log_probabilities", "memory"), torch.zeros(0))
    return advantages(Rollout(**unused, **told), PPOSettings(gamma=gamma, gae_lambda=gae_lambda))


def by_definition(
    rewards: Tensor, values: Tensor, after: Tensor, terminated: Tensor, truncated: Tensor, cut_values: Tensor
) -> list[list[float]]:
    """A(t) = Σ (γλ)^l δ(t+l), with δ = r + γ V(next) - V, up to the end of the episode or of the rollout."""
    steps, size = rewards.shape
    found = []
    for start in range(steps):
        row = []
        for at in range(size):
            sum_, weight = 0.0, 1.0
            for step in range(start, steps):
                following = float(after[at]) if step == steps - 1 else float(values[step + 1, at])
                if truncated[step, at]:
                    following = float(cut_values[step, at])
                if terminated[step, at]:
                    following = 0.0
                sum_ += weight * (float(rewards[step, at]) + GAMMA * following - float(values[step, at]))
                weight *= GAMMA * LAMBDA
                if terminated[step, at] or truncated[step, at]:
                    break
            row.append(sum_)
        found.append(row)
    return found


@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_advantages_are_those_of_the_definition(dtype: torch.dtype, within: float) -> None:
    told = story(dtype=dtype)
    assert bool((told["terminated"] & told["truncated"]).any()), "both at once is among them"
    found = compute_advantages(told, GAMMA, LAMBDA)
    truth = torch.tensor(by_definition(**told), dtype=torch.float64)
    assert float((found.double() - truth).abs().max() / truth.abs().max()) < within


def test_termination_is_worth_nothing_and_truncation_what_the_critic_says() -> None:
    one = torch.ones(1, 1)
    told: dict[str, Any] = {"rewards": one, "values": 0 * one, "after": 100 * one[0], "cut_values": 10 * one}
    never, now = one < 0, one > 0

    def advantage(terminated: Tensor, truncated: Tensor) -> float:
        return float(compute_advantages(told | {"terminated": terminated, "truncated": truncated}, 0.5, 1.0))

    assert (advantage(never, never), advantage(never, now), advantage(now, never)) == (51.0, 6.0, 1.0)
