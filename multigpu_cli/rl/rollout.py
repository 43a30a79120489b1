"""Collects rollouts: a policy acts in one group of environments."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from multigpu_cli.environments.base import EnvironmentGroup
from multigpu_cli.rl.policy import Policy

Network = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""observations (T, n, *shape), begun (T, n), memory (n, S) → outputs (T, n, k), values (T, n), memory (n, S)."""

_STATE = ("begun", "memory", "tally", "promised")


@dataclass
class Rollout:
    """T steps of E environments: all (T, E, …), but `memory` (E, S) of the policy before the first step.

    Attributes:
        begun: 1.0 where the observation is the first of an episode.
        cut_values: value of the true last observation where an episode was truncated.
        after: (E,) value of the observation after the last step.
    """

    observations: Tensor
    begun: Tensor
    actions: Tensor
    log_probabilities: Tensor
    values: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    cut_values: Tensor
    memory: Tensor
    after: Tensor


class Collector:
    """A group of environments, and the policy's memory in them.

    Args:
        environments: are reset here.
        number: of the group, over all workers.
        memory: size of the policy's memory of each environment.
    """

    def __init__(
        self, environments: EnvironmentGroup, number: int, size: int, memory: int, device: torch.device
    ) -> None:
        self.environments, self.number, self._size, self._device = environments, number, size, device
        self._observation = environments.reset()
        self._begun = torch.ones(size, device=device)
        self._memory = torch.zeros(size, memory, device=device)
        self._tally = torch.zeros(2, size, dtype=torch.float64, device=device)  # reward and length so far
        self._promised = torch.zeros(size, device=device)  # discounted sum of the rewards so far

    def state(self) -> dict[str, Any]:
        """Copies of what `load_state` needs."""
        state = {name: getattr(self, f"_{name}").clone() for name in _STATE}
        return state | {"environments": self.environments.state()}

    def load_state(self, state: dict[str, Any]) -> int:
        """Restore a state; returns how many environments had to restart their episode."""
        self._observation, restarted = self.environments.load_state(state["environments"])
        for name in _STATE:
            setattr(self, f"_{name}", state[name].to(self._device))
        return restarted

    def discount_returns(self, rollout: Rollout, gamma: float) -> Tensor:
        """(T, E): at each step of its last rollout, the discounted sum of the episode's rewards so far."""
        sums = torch.empty_like(rollout.rewards)
        over = rollout.terminated | rollout.truncated
        for step, reward in enumerate(rollout.rewards):
            sums[step] = self._promised * gamma + reward
            self._promised = torch.where(over[step], 0.0, sums[step])
        return sums

    def collect(self, network: Network, policy: Policy, noise: Tensor) -> tuple[Rollout, Tensor]:
        """Take T steps, choosing actions with the noise, (T, E, *policy.noise).

        Returns:
            The rollout, and (3,) of the episodes that ended in it: their number, and sums of rewards and lengths.
        """
        steps, size = len(noise), self._size
        rollout = self._allocate(steps, policy)
        all_outputs = torch.zeros(steps, size, policy.outputs, device=self._device)
        ended = torch.zeros(3, dtype=torch.float64, device=self._device)
        with torch.no_grad():
            for step in range(steps):
                outputs, values, memory = self._forward(network, self._observation, self._begun)
                actions = policy.choose_actions(outputs, noise[step])
                rollout.observations[step], rollout.begun[step] = self._observation, self._begun
                all_outputs[step], rollout.actions[step], rollout.values[step] = outputs, actions, values
                stepped = self.environments.step(policy.to_env_actions(actions))
                self._memory = memory
                over = stepped.terminated | stepped.truncated
                rollout.rewards[step] = stepped.reward
                rollout.terminated[step], rollout.truncated[step] = stepped.terminated, stepped.truncated
                self._tally[0] += stepped.reward
                self._tally[1] += 1
                if bool(over.any()):
                    if bool(stepped.truncated.any()):
                        going_on = torch.zeros(size, device=self._device)
                        rollout.cut_values[step] = self._forward(network, stepped.last_observation, going_on)[1]
                    ended[0] += over.sum()
                    ended[1:] += self._tally[:, over].sum(1)
                    self._tally[:, over] = 0
                self._observation, self._begun = stepped.observation, over.to(torch.float32)
            rollout.log_probabilities.copy_(policy.evaluate_actions(all_outputs, rollout.actions)[0])
            rollout.after.copy_(self._forward(network, self._observation, self._begun)[1])
        return rollout, ended

    def _forward(self, network: Network, observation: Tensor, begun: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        outputs, values, memory = network(observation[None], begun[None], self._memory)
        return outputs[0].float(), values[0].float(), memory

    def _allocate(self, steps: int, policy: Policy) -> Rollout:
        size, device = self._size, self._device

        def room(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(steps, size, *shape, dtype=dtype, device=device)

        return Rollout(
            observations=room(*self.environments.observation_shape),
            begun=room(),
            actions=room(*policy.shape, dtype=policy.dtype),
            log_probabilities=room(),
            values=room(),
            rewards=room(),
            terminated=room(dtype=torch.bool),
            truncated=room(dtype=torch.bool),
            cut_values=room(),
            memory=self._memory.clone(),
            after=torch.zeros(size, device=device),
        )
