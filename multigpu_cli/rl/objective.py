"""The loss of PPO for each decision: settings, advantages, statistics of rewards and observations."""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from multigpu_cli.config.types import integer, number, switch


class RunningMoments:
    """Count, mean and squared deviations of k quantities, by Chan's parallel update (Chan et al. 1979)."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.state = torch.zeros(1 + 2 * size, dtype=torch.float64)  # count, means, sums of squared deviations; on CPU

    def add(self, parts: Tensor) -> None:
        """Add results of `sum_moments`, (parts, 1 + 2k), row by row."""
        for count, mean, squares in (row.split([1, self.size, self.size]) for row in parts.cpu()):
            before, old_mean, old_squares = self.state.split([1, self.size, self.size])
            if not count:
                continue
            whole, away = before + count, mean - old_mean
            spread = old_squares + squares + away.square() * before * count / whole
            self.state = torch.cat([whole, old_mean + away * count / whole, spread])

    @property
    def mean(self) -> Tensor:
        """(k,)"""
        return self.state[1 : 1 + self.size]

    @property
    def deviation(self) -> Tensor:
        """(k,): 1 without data, or where all values are equal."""
        variance = self.state[1 + self.size :] / self.state[0].clamp(min=1)
        return torch.where(variance > 1e-12, variance, 1.0).sqrt()


def sum_moments(values: Tensor) -> Tensor:
    """(1 + 2k,) float64: count, mean and squared deviations of (n, k)."""
    wide = values.double()
    mean = wide.mean(0)
    count = torch.full((1,), len(wide), dtype=torch.float64, device=values.device)
    return torch.cat([count, mean, (wide - mean).square().sum(0)])


_Count = Annotated[int, integer(1)]
_Share = Annotated[float, number(0, 1)]
_Positive = Annotated[float, number(0)]
_Switch = Annotated[bool, switch]


@dataclass(frozen=True, kw_only=True)
class PPOSettings:
    """The numbers of PPO (Schulman et al. 2017, arXiv 1707.06347; defaults as in CleanRL's ppo.py)."""

    rollout: _Count = 128  # steps that each environment takes between two updates
    passes: _Count = 4  # of the optimizer over each rollout
    minibatches: _Count = 4  # optimizer steps in one pass; --batch-size gives the same in samples
    gamma: _Share = 0.99  # the discount
    gae_lambda: _Share = 0.95  # the trade of bias for variance in advantages (Schulman et al. 2015)
    clip: _Share = 0.2  # limit of the change of a probability ratio
    value_clip: _Positive = 0.2  # limit of the change of a value in one update; 0: no limit
    value_weight: _Positive = 0.5  # of that term in the loss
    entropy_weight: _Positive = 0.01  # of that term in the loss
    target_kl: _Positive = 0.0  # an update ends after a pass that moved the policy further than this; 0: never
    normalize_advantages: _Switch = True  # over the global batch
    normalize_observations: _Switch = False  # by running statistics over all environments of all workers
    normalize_rewards: _Switch = False  # by running statistics over all environments of all workers
    evaluate_every: _Count = 10  # updates between two evaluations; there is one at the end
    evaluate_episodes: _Count = 20  # of each evaluation


@dataclass
class Rollout:
    """T steps of E environments: all (T, E, …), but `memory` (E, S) of the policy before the first step."""

    observations: Tensor
    begun: Tensor  # 1.0 where the observation is the first of an episode
    actions: Tensor
    log_probabilities: Tensor
    values: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    cut_values: Tensor  # value of the true last observation where an episode was truncated
    memory: Tensor
    after: Tensor  # (E,) value of the observation after the last step


def advantages(rollout: Rollout, settings: PPOSettings, scale: float = 1.0) -> Tensor:
    """(T, E) advantages, where rewards are divided by the scale; with the values added they are the returns.

    After termination the value is 0; after truncation it is the critic's value of the true last observation. Nothing
    flows from the next episode into the previous one. One that is both truncated and terminated has terminated.
    Source: Schulman et al. 2015, arXiv 1506.02438.
    """
    rewards, values, truncated = rollout.rewards / scale, rollout.values, rollout.truncated
    going_on = ~(rollout.terminated | truncated)
    following = torch.cat([values[1:], rollout.after[None]])
    following = torch.where(going_on, following, torch.where(truncated & ~rollout.terminated, rollout.cut_values, 0.0))
    errors = rewards + settings.gamma * following - values
    result, running = torch.empty_like(rewards), torch.zeros_like(rollout.after)
    weight = settings.gamma * settings.gae_lambda * going_on.to(rewards.dtype)
    for step in reversed(range(len(rewards))):
        running = errors[step] + weight[step] * running
        result[step] = running
    return result


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
    """(…,) losses, and (5, …) METRICS of each decision, detached (Schulman et al. 2017, equations 7 and 9)."""
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
