"""PPO in one file, as CleanRL's ppo.py has it: what our rollouts and updates are measured against.

Source: Huang et al., "CleanRL", JMLR 2022; github.com/vwxyzjn/cleanrl, cleanrl/ppo.py, without its logging.
"""

from collections.abc import Iterator

import gymnasium
import numpy
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

STEPS, PASSES, PARTS = 128, 4, 4
GAMMA, LAMBDA, CLIP, ENTROPY, VALUE = 0.99, 0.95, 0.2, 0.01, 0.5


def layer(features: int, outputs: int, gain: float = 2**0.5) -> nn.Linear:
    made = nn.Linear(features, outputs)
    nn.init.orthogonal_(made.weight, gain)
    nn.init.zeros_(made.bias)
    return made


class Agent(nn.Module):
    def __init__(self, features: int, actions: int) -> None:
        super().__init__()
        self.critic = nn.Sequential(layer(features, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, 1, 1.0))
        self.actor = nn.Sequential(layer(features, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, actions, 0.01))

    def act(self, seen: Tensor, action: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        choice = Categorical(logits=self.actor(seen))
        action = choice.sample() if action is None else action
        return action, choice.log_prob(action), choice.entropy(), self.critic(seen)


def updates(id: str, environments: int) -> Iterator[None]:
    """Each update is a rollout of STEPS in every environment, and PASSES over it in PARTS minibatches."""

    def made() -> gymnasium.Env:
        return gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make(id))

    envs = gymnasium.vector.SyncVectorEnv([made] * environments)
    seen_shape, choices = envs.single_observation_space.shape, envs.single_action_space
    assert seen_shape
    assert isinstance(choices, gymnasium.spaces.Discrete)
    agent = Agent(seen_shape[0], int(choices.n))
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    shape = (STEPS, environments)
    seen = torch.zeros(*shape, *seen_shape)
    actions, log_probs, rewards, dones, values = (torch.zeros(shape) for _ in range(5))
    now, done = torch.Tensor(envs.reset(seed=1)[0]), torch.zeros(environments)
    while True:
        for step in range(STEPS):
            seen[step], dones[step] = now, done
            with torch.no_grad():
                action, log_prob, _, value = agent.act(now)
                values[step] = value.flatten()
            actions[step], log_probs[step] = action, log_prob
            following, reward, terminated, truncated, _ = envs.step(action.cpu().numpy())
            done = torch.Tensor(numpy.logical_or(terminated, truncated))
            rewards[step], now = torch.tensor(reward).view(-1), torch.Tensor(following)
        with torch.no_grad():
            after = agent.critic(now).reshape(1, -1)
            advantages = torch.zeros_like(rewards)
            last = torch.zeros(())
            for step in reversed(range(STEPS)):
                going_on = 1.0 - (done if step == STEPS - 1 else dones[step + 1])
                next_values = after if step == STEPS - 1 else values[step + 1]
                surprise = rewards[step] + GAMMA * next_values * going_on - values[step]
                advantages[step] = last = surprise + GAMMA * LAMBDA * going_on * last
            returns = advantages + values
        _learn(agent, optimizer, (seen.flatten(0, 1), actions, log_probs, values, advantages, returns))
        yield


def _learn(agent: Agent, optimizer: torch.optim.Optimizer, rollout: tuple[Tensor, ...]) -> None:
    seen, *others = rollout
    actions, log_probs, values, advantages, returns = (part.reshape(-1) for part in others)
    size = len(seen)
    indices, fractions = numpy.arange(size), []
    for _ in range(PASSES):
        numpy.random.shuffle(indices)
        for first in range(0, size, size // PARTS):
            part = indices[first : first + size // PARTS]
            _, log_prob, entropy, value = agent.act(seen[part], actions.long()[part])
            log_ratio = log_prob - log_probs[part]
            ratio = log_ratio.exp()
            with torch.no_grad():
                ((ratio - 1) - log_ratio).mean()
                fractions.append(((ratio - 1.0).abs() > CLIP).float().mean().item())
            better = advantages[part]
            better = (better - better.mean()) / (better.std() + 1e-8)
            policy = torch.max(-better * ratio, -better * torch.clamp(ratio, 1 - CLIP, 1 + CLIP)).mean()
            value = value.view(-1)
            near = values[part] + torch.clamp(value - values[part], -CLIP, CLIP)
            worse = torch.max((value - returns[part]) ** 2, (near - returns[part]) ** 2)
            loss = policy - ENTROPY * entropy.mean() + VALUE * 0.5 * worse.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
