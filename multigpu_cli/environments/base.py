"""`EnvironmentGroup`: the interface of a fixed number of environments that are stepped as one batch."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Discrete:
    """Actions 0 … n-1, one for each environment: (E,) int64."""

    n: int


@dataclass(frozen=True)
class Box:
    """Actions of real numbers: (E, *shape) float32.

    Attributes:
        low, high: bounds of every element, or one for each element in row-major order; may be infinite.
    """

    shape: tuple[int, ...]
    low: float | tuple[float, ...]
    high: float | tuple[float, ...]

    def clip(self, actions: Tensor) -> Tensor:
        """The nearest actions within the bounds."""
        low, high = (
            torch.tensor(bound, dtype=actions.dtype, device=actions.device).expand(self.shape)
            if isinstance(bound, float | int)
            else torch.tensor(bound, dtype=actions.dtype, device=actions.device).view(self.shape)
            for bound in (self.low, self.high)
        )
        return torch.minimum(torch.maximum(actions, low), high)


class StepReturn(NamedTuple):
    """What a step gave.

    Attributes:
        observation: (E, *shape) what the policy meets next: where an episode ended, the first of a new one.
        reward: (E,) float32.
        terminated: (E,) bool; the episode is over: nothing comes after it.
        truncated: (E,) bool; the episode was cut off (a time limit): what would have come after it has a value.
        last_observation: (E, *shape) the same as `observation`, but the true last one where an episode ended.
    """

    observation: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    last_observation: Tensor


class EnvironmentGroup(ABC):
    """E environments, stepped together; all tensors on one device, with leading dimension E.

    The randomness of episode k (from 0) of the environment with global number i is drawn from key(seed, i, k) alone
    (planning.rng_keys), never from what other environments or workers do.

    A factory (registry, or "module:factory") is called with those of `split` (train, val or test), `data_dir`,
    `numbers` (global numbers of the E environments, tuple[int, ...]), `seed` (the split's own), `device` and of the
    data.args that it names, and returns a group.

    Attributes:
        observation_shape: of one environment; observations are float32.
        action: what a policy may choose.
        remark: what they are made of, for the plan.
    """

    observation_shape: tuple[int, ...]
    action: Discrete | Box
    remark: str = ""

    @abstractmethod
    def reset(self) -> Tensor:
        """Begin episode 0 of every environment: the first observations (E, *shape)."""

    @abstractmethod
    def step(self, actions: Tensor) -> StepReturn:
        """Act once in every environment; where an episode ends, the next one begins at once.

        Args:
            actions: (E,) int64, or (E, *action.shape) float32 within the bounds.
        """

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """All that `load_state` needs, as tensors with leading dimension E."""

    @abstractmethod
    def load_state(self, state: dict[str, Tensor]) -> tuple[Tensor, int]:
        """Go on where `state` was taken, in place of `reset`.

        Returns:
            The observations (E, *shape) that the policy meets next, and how many environments could not be brought
            back and have begun their episode anew (0: it goes on exactly).
        """

    def figures(self) -> dict[str, Tensor]:
        """Figures of the episodes that ended in the last step, (E,) each; elsewhere without meaning.

        Their means over episodes stand beside reward and length in an evaluation.
        """
        return {}

    def details(self) -> dict[str, Any]:
        """What else there is to tell of the first environment's last episode, as plain values for a run's summary."""
        return {}
