"""The loss against plain loops in float64, and its gradient against finite differences of those."""

from math import exp

import pytest
import torch

from multigpu_cli.rl.objective import METRICS, PPOSettings, RolloutBatch, losses


def story(dtype: torch.dtype) -> tuple[RolloutBatch, torch.Tensor]:
    draws = torch.Generator().manual_seed(5)
    then = torch.randn(4, 200, generator=draws, dtype=torch.float64)
    now = torch.randn(3, 200, generator=draws, dtype=torch.float64) * 0.3
    now[0] += then[0]
    now[2] += then[1]
    return RolloutBatch(torch.zeros(200), *then.to(dtype)), now.to(dtype)


def by_definition(now: list[float], then: list[float], settings: PPOSettings) -> list[float]:
    (log_probability, entropy, value), (before, old_value, advantage, goal) = now, then
    ratio = exp(log_probability - before)
    limited = min(max(ratio, 1 - settings.clip), 1 + settings.clip)
    policy = max(-advantage * ratio, -advantage * limited)
    error = (value - goal) ** 2
    if settings.value_clip:
        near = old_value + min(max(value - old_value, -settings.value_clip), settings.value_clip)
        error = max(error, (near - goal) ** 2)
    loss = policy + settings.value_weight * error / 2 - settings.entropy_weight * entropy
    outside = float(abs(ratio - 1) > settings.clip)
    return [loss, ratio - 1 - (log_probability - before), outside, entropy, policy, error / 2]


@pytest.mark.parametrize("value_clip", [0.0, 0.2])
@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_losses_are_those_of_the_definition(value_clip: float, dtype: torch.dtype, within: float) -> None:
    settings = PPOSettings(value_clip=value_clip, clip=0.1)
    then, now = story(dtype)
    found, figures = losses(now[0], now[1], now[2], then, settings)
    rows = zip(now.T.tolist(), torch.stack(then[1:]).T.tolist(), strict=True)
    truth = torch.tensor([by_definition(new, old, settings) for new, old in rows], dtype=torch.float64).T
    both = torch.cat([found[None], figures]).double()
    assert len(both) == 1 + len(METRICS)
    assert 0 < float(truth[2].mean()) < 1, "some ratios are clipped, others not"
    assert float((both - truth).abs().max() / truth.abs().max()) < within


def test_nothing_pulls_at_a_ratio_that_has_been_clipped_and_figures_carry_no_gradient() -> None:
    settings = PPOSettings(entropy_weight=0.0, value_weight=0.0)
    moved = torch.tensor([1.0, 1.0, -1.0, -1.0], requires_grad=True)
    nothing = torch.zeros(4)
    then = RolloutBatch(nothing, nothing, nothing, torch.tensor([1.0, -1.0, 1.0, -1.0]), nothing)
    loss, figures = losses(moved, nothing, nothing, then, settings)
    loss.sum().backward()
    assert moved.grad is not None
    assert [round(float(pull), 3) for pull in moved.grad] == [0.0, 2.718, -0.368, 0.0]
    assert not figures.requires_grad
