"""The loss of PPO, for each decision."""

from typing import NamedTuple

import torch
from torch import Tensor

from multigpu_cli.tasks.ppo.settings import PPOSettings

METRICS = ("kl", "clip_fraction", "entropy", "policy_loss", "value_loss")


class RolloutBatch(NamedTuple):
    """Decisions of a rollout and their outcomes: all (…,), actions (…, *shape)."""

    actions: Tensor
    log_probabilities: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor


def losses(
    log_probabilities: Tensor, entropies: Tensor, values: Tensor, then: RolloutBatch, settings: PPOSettings
) -> tuple[Tensor, Tensor]:
    """(…,) losses, and (5, …) METRICS of each decision, detached (Schulman et al. 2017, equations 7 and 9).

    Args:
        log_probabilities, entropies, values: (…,) of the current policy.
        then: of the policy during the rollout.
    """
    moved = log_probabilities - then.log_probabilities
    ratio = moved.exp()
    clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
    policy = -torch.minimum(ratio * then.advantages, clipped * then.advantages)
    error = (values - then.returns).square()
    if settings.value_clip:
        near = then.values + (values - then.values).clamp(-settings.value_clip, settings.value_clip)
        error = torch.maximum(error, (near - then.returns).square())
    value = 0.5 * error
    loss = policy + settings.value_weight * value - settings.entropy_weight * entropies
    with torch.no_grad():
        divergence = (ratio - 1) - moved  # Schulman, "Approximating KL Divergence", 2020: unbiased, and never below 0
        outside = ((ratio - 1).abs() > settings.clip).to(ratio.dtype)
        figures = torch.stack([divergence, outside, entropies, policy, value])
    return loss, figures
