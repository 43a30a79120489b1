"""Generalized advantage estimation: how much better an action was than the critic expected."""

import torch
from torch import Tensor


def advantages(
    rewards: Tensor,
    values: Tensor,
    after: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    cut_values: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
) -> Tensor:
    """(T, E) advantages; with the values added they are the returns (Schulman et al. 2015, arXiv 1506.02438).

    After termination the value is 0; after truncation it is the critic's value of the true last observation. Nothing
    flows from the next episode into the previous one.

    Args:
        rewards, values: (T, E), at each step, and of the observation before it.
        after: (E,) value of the observation after the last step.
        terminated, truncated: (T, E) bool; where both are set, the episode has terminated.
        cut_values: (T, E) value of the true last observation where an episode was truncated; unused elsewhere.
    """
    going_on = ~(terminated | truncated)
    following = torch.cat([values[1:], after[None]])
    following = torch.where(going_on, following, torch.where(truncated & ~terminated, cut_values, 0.0))
    errors = rewards + gamma * following - values
    result, running = torch.empty_like(rewards), torch.zeros_like(after)
    weight = gamma * gae_lambda * going_on.to(rewards.dtype)
    for step in reversed(range(len(rewards))):
        running = errors[step] + weight[step] * running
        result[step] = running
    return result
