"""Actor-critic models, without and with an LSTM."""

from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from multigpu_cli.models.normalizer import Normalizer


class Heads(nn.Module):
    """Maps features to a policy's outputs: logits, or means with a deviation that does not depend on the features.

    Args:
        features: number of features of the actor.
        outputs: number of outputs of the policy.
        action: the action space; one with a `shape` (Box) has means and logarithms of deviations as outputs.
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
    """Two perceptrons with tanh, as in CleanRL's ppo.py."""

    memory_size = 0

    def __init__(self, input_shape: tuple[int, ...], outputs: int, action: Any, width: int, depth: int) -> None:
        super().__init__()
        self.normalizer = Normalizer(input_shape)
        self.dimensions = len(input_shape)
        self.actor, self.critic = (_perceptron(prod(input_shape), width, depth) for _ in range(2))
        self.heads = Heads(width, outputs, action)
        self.value = orthogonal(nn.Linear(width, 1), 1.0)

    def forward(self, observations: Tensor, begun: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        seen = self.normalizer(observations).flatten(observations.ndim - self.dimensions)
        return self.heads(self.actor(seen)), self.value(self.critic(seen)).squeeze(-1), memory


class RecurrentActorCritic(nn.Module):
    """A perceptron, an LSTM over time, and linear actor and critic on its output (CleanRL's ppo_atari_lstm.py)."""

    def __init__(self, input_shape: tuple[int, ...], outputs: int, action: Any, width: int, hidden: int) -> None:
        super().__init__()
        self.memory_size = 2 * hidden
        self.normalizer = Normalizer(input_shape)
        self.dimensions = len(input_shape)
        self.features = _perceptron(prod(input_shape), width, 1)
        self.lstm = orthogonal_lstm(nn.LSTM(width, hidden))
        self.heads = Heads(hidden, outputs, action)
        self.value = orthogonal(nn.Linear(hidden, 1), 1.0)

    def forward(self, observations: Tensor, begun: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        seen = self.normalizer(observations).flatten(observations.ndim - self.dimensions)
        hidden, memory = unroll_lstm(self.lstm, self.features(seen), begun, memory)
        return self.heads(hidden), self.value(hidden).squeeze(-1), memory


def unroll_lstm(lstm: nn.LSTM, inputs: Tensor, begun: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Run an LSTM over (T, n, features), resetting its state where an episode begins.

    The steps between two resets, of any sequence, are one call of the LSTM for the whole batch.

    Args:
        begun: (T, n), nonzero at the first step of an episode.
        memory: (n, 2 · hidden), hidden state and cell state before the first step.

    Returns:
        Outputs (T, n, hidden), and the memory after the last step.
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


def build(input_shape: tuple[int, ...], num_classes: int, action: Any, width: int = 64, depth: int = 2) -> nn.Module:
    """Actor and critic of `depth` hidden layers each."""
    return ActorCritic(input_shape, num_classes, action, width, depth)


def build_lstm(
    input_shape: tuple[int, ...], num_classes: int, action: Any, width: int = 64, hidden: int = 64
) -> nn.Module:
    """Actor and critic that share an LSTM of `hidden` units."""
    return RecurrentActorCritic(input_shape, num_classes, action, width, hidden)
