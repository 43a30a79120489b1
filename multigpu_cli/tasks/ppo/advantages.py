"""How much better an action was than what was expected: generalised advantage estimation."""

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

    An episode that terminated is worth nothing afterwards; one that was only cut off would have gone on from its true
    last observation, and is worth what the critic says of that. Neither lets anything pass from the next episode.

    Args:
        rewards, values: (T, E), at each step, and of the observation before it.
        after: (E,) value of the observation after the last step.
        terminated, truncated: (T, E) bool; where both are set, the episode has terminated.
        cut_values: (T, E) value of the true last observation where an episode was truncated; elsewhere not looked at.
    """
    going_on = ~(terminated | truncated)
    following = torch.cat([values[1:], after[None]])
    following = torch.where(going_on, following, torch.where(truncated & ~terminated, cut_values, 0.0))
    surprise = rewards + gamma * following - values
    found, carried = torch.empty_like(rewards), torch.zeros_like(after)
    weight = gamma * gae_lambda * going_on.to(rewards.dtype)
    for step in reversed(range(len(rewards))):
        carried = surprise[step] + weight[step] * carried
        found[step] = carried
    return found
