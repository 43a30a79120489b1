"""Evaluation: whole episodes in separate environments, the same ones every time."""

from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from multigpu_cli.environments.base import EnvironmentGroup
from multigpu_cli.errors import RequestError, TrainingError
from multigpu_cli.runtime.world import World
from multigpu_cli.tasks.ppo.env_source import EnvSource
from multigpu_cli.tasks.ppo.policy import Policy
from multigpu_cli.tasks.ppo.rollout import Network

_LONGEST = 1_000_000  # steps
_GROUP = 32  # episodes that are played as one batch, on any number of workers


class Episodes:
    """The first episode of so many environments of a split, each played by one worker.

    Attributes:
        size: how many episodes.
    """

    def __init__(self, source: EnvSource, split: str, world: World, size: int) -> None:
        self.source, self.split, self.world, self.size = source, split, world, size
        self.data_location = "played"
        self._groups: dict[int, EnvironmentGroup] = {}

    def close(self) -> None:
        """Nothing to close."""

    def eval_batches(self, batch_size: int, rank: int, workers: int) -> NoReturn:
        """Not available: episodes have no samples.

        Raises:
            RequestError: always.
        """
        raise RequestError("--task ppo has episodes, not samples with predictions", remedy="multigpu evaluate")

    def play(self, network: Network, policy: Policy, memory: int) -> Iterator[tuple[range, dict[str, Tensor]]]:
        """Yield the numbers of the episodes of each group of this worker, and their metrics, (E,) each.

        The most likely action is always taken.
        """
        count = -(-self.size // _GROUP)
        rank, workers = self.world.rank, self.world.size
        for number in range(count * rank // workers, count * (rank + 1) // workers):
            numbers = range(number * _GROUP, min((number + 1) * _GROUP, self.size))
            if number not in self._groups:
                self._groups[number] = self.source.make(self.split, numbers, self.world.device)
            yield numbers, _first_episodes(self._groups[number], network, policy, len(numbers), memory)

    def details(self) -> dict[str, Any]:
        """Details of the first episode, on the worker that played it."""
        return self._groups[0].details() if 0 in self._groups else {}


def _first_episodes(
    environments: EnvironmentGroup, network: Network, policy: Policy, size: int, memory: int
) -> dict[str, Tensor]:
    observation = environments.reset()
    device = observation.device
    state, begun = torch.zeros(size, memory, device=device), torch.ones(size, device=device)
    running = torch.ones(size, dtype=torch.bool, device=device)
    metrics = {name: torch.zeros(size, dtype=torch.float64, device=device) for name in ("reward", "length")}
    for _ in range(_LONGEST):
        outputs, _, state = network(observation[None], begun[None], state)
        stepped = environments.step(policy.to_env_actions(policy.choose_actions(outputs[0].float(), None)))
        metrics["reward"] += torch.where(running, stepped.reward, 0.0)
        metrics["length"] += running
        over = stepped.terminated | stepped.truncated
        if bool((over & running).any()):
            for name, values in environments.figures().items():
                before = metrics.setdefault(name, torch.zeros_like(metrics["reward"]))
                metrics[name] = torch.where(over & running, values.double(), before)
            running &= ~over
            if not bool(running.any()):
                return metrics
        observation, begun = stepped.observation, over.to(torch.float32)
    raise TrainingError(f"an episode of an evaluation did not end in {_LONGEST:,} steps", remedy="a time limit")
