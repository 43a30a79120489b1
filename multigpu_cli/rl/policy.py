"""Actor-critic networks, and their outputs as a policy: actions, their probabilities, and the entropy.

Cascaded LSTMs: the output of one over a window of observations is the input of those of actor and critic. Source: Zou,
Lou, Wang and Liu, "A Novel Deep Reinforcement Learning Based Automated Stock Trading System Using Cascaded LSTM
Networks" (CLSTM-PPO), arXiv 2212.02721, 2022.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from math import log, pi, prod, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from multigpu_cli.environments.base import Box, Discrete
from multigpu_cli.models.networks.mlp import Normalizer

Network = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""observations (T, n, *shape), begun (T, n), memory (n, S) → outputs (T, n, k), values (T, n), memory (n, S)."""


class Policy(ABC):
    """The meaning of outputs (…, k) for one space of actions."""

    outputs: int  # k
    noise: tuple[int, ...]  # shape of the random numbers that one choice needs
    shape: tuple[int, ...]  # of an action
    dtype: torch.dtype  # of an action

    @abstractmethod
    def sample_noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """(*shape, *noise) random numbers on the CPU."""

    @abstractmethod
    def choose_actions(self, outputs: Tensor, noise: Tensor | None) -> Tensor:
        """An action for each output, the most likely one without noise; not clipped to bounds."""

    @abstractmethod
    def evaluate_actions(self, outputs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """(…,) logarithms of the actions' probabilities (or densities), and (…,) entropies of the policy."""

    def to_env_actions(self, actions: Tensor) -> Tensor:
        """The actions as the environment takes them."""
        return actions


class Categorical(Policy):
    """Outputs are the logits of n actions."""

    def __init__(self, space: Discrete) -> None:
        self.outputs, self.noise, self.shape, self.dtype = space.n, (space.n,), (), torch.int64

    def sample_noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Gumbel noise: the greatest of logits plus such noise is a draw from their softmax."""
        return torch.empty(*shape, *self.noise).exponential_(generator=generator).log_().neg_()

    def choose_actions(self, outputs: Tensor, noise: Tensor | None) -> Tensor:
        return (outputs if noise is None else outputs + noise).argmax(-1)

    def evaluate_actions(self, outputs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        logarithms = outputs.log_softmax(-1)
        entropy = -(logarithms.exp() * logarithms).sum(-1)
        return logarithms.gather(-1, actions.unsqueeze(-1)).squeeze(-1), entropy


class Gaussian(Policy):
    """Outputs are the means of independent normal distributions, and after them the logarithms of their deviations."""

    def __init__(self, space: Box) -> None:
        self.space = space
        self.size = prod(space.shape)
        self.outputs, self.noise, self.shape, self.dtype = 2 * self.size, (self.size,), space.shape, torch.float32

    def sample_noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(*shape, *self.noise, generator=generator)

    def choose_actions(self, outputs: Tensor, noise: Tensor | None) -> Tensor:
        mean, log_deviation = outputs.split(self.size, -1)
        flat: Tensor = mean if noise is None else mean + log_deviation.exp() * noise
        return flat.reshape(*flat.shape[:-1], *self.space.shape)

    def evaluate_actions(self, outputs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_deviation = outputs.split(self.size, -1)
        flat = actions.reshape(mean.shape)
        away = (flat - mean) * (-log_deviation).exp()
        density = -0.5 * away.square() - log_deviation - 0.5 * log(2 * pi)
        entropy = log_deviation + 0.5 * (1 + log(2 * pi))
        return density.sum(-1), entropy.sum(-1)

    def to_env_actions(self, actions: Tensor) -> Tensor:
        return self.space.clip(actions)


def build_policy(space: Discrete | Box) -> Policy:
    """The policy over this space of actions."""
    return Categorical(space) if isinstance(space, Discrete) else Gaussian(space)


class Heads(nn.Module):
    """Maps features to a policy's outputs: logits, or means with a deviation that does not depend on the features.

    A space of actions with a `shape` (Box) has means and logarithms of deviations as outputs.
    """

    def __init__(self, features: int, outputs: int, action: Any) -> None:
        super().__init__()
        real = hasattr(action, "shape")
        self.actor = orthogonal(nn.Linear(features, outputs // 2 if real else outputs), 0.01)
        self.log_deviation = nn.Parameter(torch.zeros(outputs // 2)) if real else None

    def forward(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.actor(features)
        if self.log_deviation is None:
            return outputs
        return torch.cat([outputs, self.log_deviation.expand_as(outputs)], -1)


class ActorCritic(nn.Module):
    """Two perceptrons of `depth` layers with tanh, as in CleanRL's ppo.py."""

    memory_size = 0

    def __init__(
        self, input_shape: tuple[int, ...], num_classes: int, action: Any, width: int = 64, depth: int = 2
    ) -> None:
        super().__init__()
        self.normalizer = Normalizer(input_shape)
        self.dimensions = len(input_shape)
        self.actor, self.critic = (_perceptron(prod(input_shape), width, depth) for _ in range(2))
        self.heads = Heads(width, num_classes, action)
        self.value = orthogonal(nn.Linear(width, 1), 1.0)

    def forward(self, observations: Tensor, begun: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        seen = self.normalizer(observations).flatten(observations.ndim - self.dimensions)
        return self.heads(self.actor(seen)), self.value(self.critic(seen)).squeeze(-1), memory


class RecurrentActorCritic(nn.Module):
    """A perceptron, an LSTM over time, and linear actor and critic on its output (CleanRL's ppo_atari_lstm.py)."""

    def __init__(
        self, input_shape: tuple[int, ...], num_classes: int, action: Any, width: int = 64, hidden: int = 64
    ) -> None:
        super().__init__()
        self.memory_size = 2 * hidden
        self.normalizer = Normalizer(input_shape)
        self.dimensions = len(input_shape)
        self.features = _perceptron(prod(input_shape), width, 1)
        self.lstm = orthogonal_lstm(nn.LSTM(width, hidden))
        self.heads = Heads(hidden, num_classes, action)
        self.value = orthogonal(nn.Linear(hidden, 1), 1.0)

    def forward(self, observations: Tensor, begun: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        seen = self.normalizer(observations).flatten(observations.ndim - self.dimensions)
        hidden, memory = unroll_lstm(self.lstm, self.features(seen), begun, memory)
        return self.heads(hidden), self.value(hidden).squeeze(-1), memory


def unroll_lstm(lstm: nn.LSTM, inputs: Tensor, begun: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Run an LSTM over (T, n, features), resetting its state where an episode begins.

    The steps between two resets, of any sequence, are one call of the LSTM for the whole batch. `begun` (T, n) is
    nonzero at the first step of an episode; `memory` (n, 2 · hidden) holds hidden state and cell state before the first
    step. Returns outputs (T, n, hidden), and the memory after the last step.
    """
    keep = (begun == 0).to(inputs.dtype).unsqueeze(-1)
    steps = len(inputs)
    cuts = [0] if steps == 1 else [0, *(int(at) for at in (begun[1:] != 0).any(1).nonzero().flatten() + 1)]
    parts = []
    hidden, cell = memory.to(inputs.dtype).unsqueeze(0).chunk(2, -1)
    for first, stop in zip(cuts, [*cuts[1:], steps], strict=True):
        hidden, cell = hidden * keep[first], cell * keep[first]
        outputs, (hidden, cell) = lstm(inputs[first:stop], (hidden.contiguous(), cell.contiguous()))
        parts.append(outputs)
    return torch.cat(parts), torch.cat([hidden, cell], -1).squeeze(0)


def orthogonal(layer: nn.Linear, gain: float) -> nn.Linear:
    """Initialize with orthogonal weights and zero bias, as is usual for PPO."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def orthogonal_lstm(lstm: nn.LSTM) -> nn.LSTM:
    """Initialize with orthogonal weights and zero biases."""
    for name, parameter in lstm.named_parameters():
        (nn.init.zeros_ if "bias" in name else nn.init.orthogonal_)(parameter)
    return lstm


def _perceptron(features: int, width: int, depth: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [orthogonal(nn.Linear(features, width), sqrt(2)), nn.Tanh()]
        features = width
    return nn.Sequential(*layers)


class CascadedActorCritic(nn.Module):
    """An LSTM extractor over each observation's window, then one LSTM over time for the actor and one for the critic.

    The input is (window, …), the last observations with the newest at the end; one dimension is a window of one. The
    extractor has `features` units, actor and critic `hidden` each. The extractor's learning rate is a share of the
    schedule's: by prefixes of parameter names the attribute `rate_factors` has such factors.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        action: Any,
        features: int = 128,
        hidden: int = 128,
        extractor_rate: float = 1.0,
    ) -> None:
        super().__init__()
        self.window = input_shape if len(input_shape) > 1 else (1, *input_shape)
        self.memory_size = 4 * hidden
        self.rate_factors = {"extractor.": extractor_rate} if extractor_rate != 1 else {}
        self.normalizer = Normalizer(input_shape)
        lstm = orthogonal_lstm(nn.LSTM(prod(self.window[1:]), features))
        linear = orthogonal(nn.Linear(features, features), 2**0.5)
        self.extractor = nn.ModuleDict({"lstm": lstm, "linear": linear})
        self.actor, self.critic = (orthogonal_lstm(nn.LSTM(features, hidden)) for _ in range(2))
        self.heads = Heads(hidden, num_classes, action)
        self.value = orthogonal(nn.Linear(hidden, 1), 1.0)

    def forward(self, observations: Tensor, begun: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        steps, size = begun.shape
        window = self.normalizer(observations).view(steps * size, self.window[0], -1).transpose(0, 1)
        read, _ = self.extractor["lstm"](window)
        features = self.extractor["linear"](read[-1]).tanh().view(steps, size, -1)
        own, critics = memory.chunk(2, -1)
        acted, own = unroll_lstm(self.actor, features, begun, own)
        valued, critics = unroll_lstm(self.critic, features, begun, critics)
        return self.heads(acted), self.value(valued).squeeze(-1), torch.cat([own, critics], -1)
