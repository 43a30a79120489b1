"""`EnvironmentGroup`: the interface of a fixed number of environments, stepped as one batch."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multigpu_cli.capabilities import ENVIRONMENTS
from multigpu_cli.runtime.factories import find_factory


@dataclass(frozen=True)
class Discrete:
    """Actions 0 … n-1, one per environment: (E,) int64."""

    n: int


@dataclass(frozen=True)
class Box:
    """Continuous actions: (E, *shape) float32."""

    shape: tuple[int, ...]
    low: float | tuple[float, ...]  # the bound of all elements, or one per element in row-major order; may be infinite
    high: float | tuple[float, ...]  # likewise, from above

    def clip(self, actions: Tensor) -> Tensor:
        """The nearest actions within the bounds."""
        bounds = (torch.tensor(bound, dtype=actions.dtype, device=actions.device) for bound in (self.low, self.high))
        low, high = (bound.view(self.shape) if bound.ndim else bound for bound in bounds)
        return actions.clamp(low, high)


class StepReturn(NamedTuple):
    """The result of a step."""

    observation: Tensor  # (E, *shape), the policy's next input: after an episode's end, the first one of a new episode
    reward: Tensor  # (E,) float32
    terminated: Tensor  # (E,) bool; the episode reached a terminal state, whose value is 0
    truncated: Tensor  # (E,) bool; the episode was cut off (a time limit), and its last state has a value
    last_observation: Tensor  # (E, *shape), like `observation`, but the last one of its episode where one ended


class EnvironmentGroup(ABC):
    """E environments, stepped together; all tensors on one device, with leading dimension E.

    The random numbers of episode k (from 0) of the environment with global number i depend only on key(seed, i, k)
    (planning.rng_keys), not on other environments or workers.

    A factory (registry, or "module:factory") returns a group. It is called with those arguments that it names among
    `split` (train, val or test), `data_dir`, `numbers` (global numbers of the E environments, tuple[int, ...]), `seed`
    (of the split), `device` and the data.args.
    """

    observation_shape: tuple[int, ...]  # of one environment; observations are float32
    action: Discrete | Box  # the action space
    remark: str = ""  # a description of the environments, which the plan shows

    @abstractmethod
    def reset(self) -> Tensor:
        """Begin episode 0 of every environment; returns the first observations (E, *shape)."""

    @abstractmethod
    def step(self, actions: Tensor) -> StepReturn:
        """Step every environment once; where an episode ends, the next one begins at once.

        `actions` are (E,) int64, or (E, *action.shape) float32 within the bounds.
        """

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """The state for `load_state`, as tensors with leading dimension E."""

    @abstractmethod
    def load_state(self, state: dict[str, Tensor]) -> tuple[Tensor, int]:
        """Continue from a captured state; replaces `reset`.

        Returns the next observations (E, *shape), and the number of environments whose state could not be restored and
        whose episode was restarted (0: exact resume).
        """

    def figures(self) -> dict[str, Tensor]:
        """Metrics of the episodes that ended in the last step, (E,) each; undefined for other environments.

        An evaluation reports their means over episodes together with reward and length.
        """
        return {}

    def details(self) -> dict[str, Any]:
        """More about the first environment's last episode, as plain values for the summary of the run."""
        return {}


def find_group_factory(data: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The factory of a group that --data names, and the arguments in that name (gym:ID)."""
    name, _, rest = data.partition(":")
    builtin = name in ENVIRONMENTS
    found = find_factory(name if builtin else data, ENVIRONMENTS, flag="--data")
    return found, {"id": rest} if builtin and rest else {}
