"""A small world to act in, as --data names it, and a network for it: a walk along a corridor with a lit end."""

import torch
from torch import Tensor, nn

from multigpu_cli.environments.base import Box, Discrete, EnvironmentGroup, StepReturn
from multigpu_cli.planning.batch import make_key
from multigpu_cli.rl.policy import ActorCritic, RecurrentActorCritic
from tests.support.user_code import Deed


class Corridor(EnvironmentGroup):
    """Each episode begins somewhere on 0 … 8; at 8 it terminates with a reward of 1, after `limit` steps it is cut off.

    Observations are (place / 8, noise): the noise is drawn anew for each episode.
    """

    def __init__(self, numbers: tuple[int, ...], seed: int, device: torch.device, limit: int, real: bool) -> None:
        self.observation_shape = (2,)
        self.action = Box((1,), -1.0, 1.0) if real else Discrete(2)
        self._numbers, self._seed, self._device, self._limit = numbers, seed, device, limit
        self._place, self._noise, self._steps, self._episode = (torch.zeros(len(numbers)) for _ in range(4))

    def reset(self) -> Tensor:
        self._episode = torch.zeros(len(self._numbers))
        self._begin(torch.ones(len(self._numbers), dtype=torch.bool))
        return self._seen()

    def step(self, actions: Tensor) -> StepReturn:
        assert not isinstance(self.action, Box) or float(actions.abs().max()) <= 1
        move = actions.flatten().cpu() if isinstance(self.action, Box) else 2 * actions.cpu() - 1
        self._place = (self._place + move).clamp(0, 8)
        self._steps = self._steps + 1
        terminated = self._place >= 8
        truncated = self._steps >= self._limit
        self._ended_after, last = self._steps, self._seen()
        over = terminated | truncated
        self._episode = self._episode + over
        self._begin(over)
        rewards = (terminated.float() - 0.01).to(self._device)
        return StepReturn(self._seen(), rewards, terminated.to(self._device), truncated.to(self._device), last)

    def state(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).clone() for name in ("_place", "_noise", "_steps", "_episode")}

    def load_state(self, state: dict[str, Tensor]) -> tuple[Tensor, int]:
        for name, value in state.items():
            setattr(self, name, value.clone())
        return self._seen(), 0

    def figures(self) -> dict[str, Tensor]:
        return {"half_length": self._ended_after / 2}

    def _begin(self, which: Tensor) -> None:
        place, noise = self._place.clone(), self._noise.clone()
        for at in which.nonzero().flatten().tolist():
            generator = torch.Generator().manual_seed(make_key(self._seed, self._numbers[at], int(self._episode[at])))
            place[at], noise[at] = torch.randint(8, (), generator=generator), torch.rand((), generator=generator)
        self._place, self._noise = place, noise
        self._steps = torch.where(which, 0, self._steps)

    def _seen(self) -> Tensor:
        return torch.stack([self._place / 8, self._noise], 1).to(self._device)


class Forgetful(Corridor):
    """It can't give its state: every environment begins its episode anew."""

    def load_state(self, state: dict[str, Tensor]) -> tuple[Tensor, int]:
        return self.reset(), len(self._numbers)


def corridor(
    numbers: tuple[int, ...], seed: int, device: torch.device, limit: int = 13, real: bool = False
) -> EnvironmentGroup:
    return Corridor(numbers, seed, device, limit, real)


def forgetful(numbers: tuple[int, ...], seed: int, device: torch.device) -> EnvironmentGroup:
    return Forgetful(numbers, seed, device, 13, False)


class Doing(nn.Module):
    """A network of ours that does at some pass of training what the environment says (tests.support.user_code)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.deed, self.memory_size = inner, Deed(), inner.memory_size
        self.normalizer = inner.normalizer

    def forward(self, observations: Tensor, begun: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = self.inner(self.deed(observations), begun, memory)
        return found


def net(input_shape: tuple[int, ...], num_classes: int, action: Discrete | Box, lstm: bool = False) -> nn.Module:
    made = RecurrentActorCritic if lstm else ActorCritic
    return Doing(made(input_shape, num_classes, action, 8))


class Overflowing(Doing):
    """Its gradient is infinite at one pass of training; what it says is finite."""

    at = 0

    def forward(self, observations: Tensor, begun: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        outputs, values, memory = super().forward(observations, begun, memory)
        if self.training and self.deed.passes == self.at:
            values.register_hook(lambda gradient: gradient * float("inf"))
        return outputs, values, memory


def overflowing(input_shape: tuple[int, ...], num_classes: int, action: Discrete | Box, at: int) -> nn.Module:
    made = Overflowing(ActorCritic(input_shape, num_classes, action, 8))
    made.at = at
    return made
