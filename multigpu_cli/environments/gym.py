"""Any gymnasium environment by its id: a loop over E of them, whose episodes can be replayed."""

from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from multigpu_cli.environments.base import Box, Discrete, EnvironmentGroup, StepReturn
from multigpu_cli.errors import RequestError
from multigpu_cli.planning.batch import make_key
from multigpu_cli.runtime.factories import import_extra


class GymGroup(EnvironmentGroup):
    """The environments of --data gym:ID, E of one id, which run on the CPU; tensors are on the device.

    An episode begins with `reset(seed=…)`, so its seed and its actions determine it and are the state. It is restored
    by replaying the actions. If the observation then differs, because an environment has randomness that the seed does
    not control, the episode is restarted. The policy does not receive the elements `hide` of a flat observation.

    RequestError: gymnasium is not installed, or has no such environment, or its action space is not supported.
    """

    def __init__(
        self,
        id: str,
        numbers: Sequence[int],
        seed: int,
        device: torch.device,
        hide: Sequence[int] = (),
        options: dict[str, Any] | None = None,
    ) -> None:
        self._numbers, self._seed, self._device = list(numbers), seed, device
        self._all = [_make(id, options or {}) for _ in self._numbers]
        observed, acted = self._all[0].observation_space, self._all[0].action_space
        if hide and (len(observed.shape) != 1 or not set(hide) < set(range(observed.shape[0]))):
            raise RequestError(
                f"data.args.hide: {list(hide)} does not fit an observation of shape {observed.shape}",
                remedy="give indices of a flat observation, and leave at least one element visible",
            )
        self._seen = [at for at in range(observed.shape[0]) if at not in set(hide)] if hide else None
        self.observation_shape = (len(self._seen),) if self._seen else tuple(observed.shape)
        self.action, self._first_action = _action(id, acted), int(getattr(acted, "start", 0))
        self._episodes = [0] * len(self._all)
        self._taken: list[list[Any]] = [[] for _ in self._all]  # the actions of the running episodes
        self._now = numpy.zeros((len(self._all), *observed.shape), dtype=numpy.float32)

    def reset(self) -> Tensor:
        self._now = numpy.empty_like(self._now)
        for at in range(len(self._all)):
            self._begin(at, 0)
        return self._to_tensor(self._now)

    def step(self, actions: Tensor) -> StepReturn:
        size = len(self._all)
        rewards, terminated, truncated = numpy.zeros(size, numpy.float32), [False] * size, [False] * size
        self._now = numpy.empty_like(self._now)  # a new array: tensors that were returned share the old one
        ended = []
        for at, action in enumerate(self._to_gym_actions(actions)):
            self._taken[at].append(action)
            self._now[at], rewards[at], terminated[at], truncated[at], _ = self._all[at].step(action)
            if terminated[at] or truncated[at]:
                ended.append(at)
        shown = last_shown = self._to_tensor(self._now)
        if ended:
            self._now = self._now.copy()
            for at in ended:
                self._begin(at, self._episodes[at] + 1)
            shown = self._to_tensor(self._now)
        flags = torch.tensor([terminated, truncated], device=self._device)
        return StepReturn(shown, torch.from_numpy(rewards).to(self._device), flags[0], flags[1], last_shown)

    def state(self) -> dict[str, Tensor]:
        longest = max(map(len, self._taken))
        kind = torch.int64 if isinstance(self.action, Discrete) else torch.float32
        shape = () if isinstance(self.action, Discrete) else self.action.shape
        actions = torch.zeros((len(self._all), longest, *shape), dtype=kind)
        for row, taken in zip(actions, self._taken, strict=True):
            row[: len(taken)] = torch.as_tensor(numpy.array(taken, dtype=actions.numpy().dtype).reshape(-1, *shape))
        return {
            "episode": torch.tensor(self._episodes),
            "length": torch.tensor([len(taken) for taken in self._taken]),
            "actions": actions,
            "observation": torch.from_numpy(self._now.copy()),
        }

    def load_state(self, state: dict[str, Tensor]) -> tuple[Tensor, int]:
        self._now, restarted = numpy.empty_like(self._now), 0
        for at, episode in enumerate(state["episode"].tolist()):
            self._begin(at, episode)
            for action in self._to_gym_actions(state["actions"][at, : int(state["length"][at])], from_zero=False):
                self._taken[at].append(action)
                self._now[at] = self._all[at].step(action)[0]
            if not numpy.array_equal(self._now[at], state["observation"][at].numpy(), equal_nan=True):
                restarted += 1
                self._begin(at, episode)
        return self._to_tensor(self._now), restarted

    def _begin(self, at: int, episode: int) -> None:
        number = make_key(self._seed, self._numbers[at], episode) & 0x7FFFFFFF
        self._now[at], _ = self._all[at].reset(seed=number)
        self._episodes[at] = episode
        self._taken[at] = []

    def _to_gym_actions(self, actions: Tensor, *, from_zero: bool = True) -> list[Any]:
        """One action per environment, or per step, in gymnasium's form."""
        if isinstance(self.action, Box):
            return list(actions.cpu().numpy())
        first = self._first_action if from_zero else 0
        return [action + first for action in actions.tolist()]

    def _to_tensor(self, observations: numpy.ndarray) -> Tensor:
        whole = torch.from_numpy(observations).to(self._device)
        return whole[:, self._seen] if self._seen else whole


def _make(id: str, options: dict[str, Any]) -> Any:
    lacks = f"--data gym:{id}: the package gymnasium is not installed"
    gymnasium = import_extra("gymnasium", lacks, "pip install 'multigpu-cli[rl]'")
    try:
        made: Any = gymnasium.make(id, disable_env_checker=True, **options)
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise RequestError(f"--data gym:{id}: {error}", remedy="use an id that gymnasium.make accepts") from error
    is_box = isinstance(made.observation_space, gymnasium.spaces.Box)
    return made if is_box else gymnasium.wrappers.FlattenObservation(made)


def _action(id: str, space: Any) -> Discrete | Box:
    import gymnasium

    if isinstance(space, gymnasium.spaces.Discrete):
        return Discrete(int(space.n))
    if isinstance(space, gymnasium.spaces.Box) and numpy.issubdtype(space.dtype, numpy.floating):
        bounds = (tuple(map(float, bound.ravel())) for bound in (space.low, space.high))
        return Box(tuple(space.shape), *bounds)
    problem = f"--data gym:{id}: the action space {space} is not supported"
    raise RequestError(problem, remedy="use an environment with Discrete or real Box actions")
