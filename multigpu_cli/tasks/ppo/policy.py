"""A model's outputs as a policy: actions, their probabilities, and the entropy."""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from multigpu_cli.environments.base import Box, Discrete


class Policy(ABC):
    """The meaning of outputs (…, k) for one space of actions.

    Attributes:
        outputs: k.
        noise: shape of the random numbers that one choice needs.
        shape, dtype: of an action.
    """

    outputs: int
    noise: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

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
        self.size = math.prod(space.shape)
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
        density = -0.5 * away.square() - log_deviation - 0.5 * math.log(2 * math.pi)
        entropy = log_deviation + 0.5 * (1 + math.log(2 * math.pi))
        return density.sum(-1), entropy.sum(-1)

    def to_env_actions(self, actions: Tensor) -> Tensor:
        return self.space.clip(actions)


def build_policy(space: Discrete | Box) -> Policy:
    """The policy over this space of actions."""
    return Categorical(space) if isinstance(space, Discrete) else Gaussian(space)
