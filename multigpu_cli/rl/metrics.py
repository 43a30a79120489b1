"""PPO's metrics and finished episodes: sums that stay on the device until they are logged."""

from collections.abc import Generator, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from multigpu_cli.distributed.world import World, all_gather, all_reduce_sum
from multigpu_cli.environments.base import EnvironmentGroup
from multigpu_cli.errors import RequestError, TrainingError
from multigpu_cli.monitor.meters import divide
from multigpu_cli.rl.env_source import EnvSource
from multigpu_cli.rl.objective import METRICS
from multigpu_cli.rl.policy import Network, Policy


class PPOMetrics:
    """Counts over all workers, and the metrics of the epoch's optimizer steps so far.

    Decisions are those in all optimizer steps, so one counts in every pass; steps are those of environments.
    """

    def __init__(self, source: EnvSource, world: World) -> None:
        self._world, self._source = world, source
        self.decisions = self.steps = self.episodes = 0
        self._ended = [0.0, 0.0, 0.0]  # episodes, rewards, lengths since the last line
        self._explained: Tensor | None = None
        self._slots = torch.empty(0)
        self._own_steps, self._own_seconds, self._steps_before = 0, 0.0, 0

    @property
    def steps_taken(self) -> int:
        """Optimizer steps: all of them have equally many decisions."""
        return self.decisions // self._source.decisions_per_step

    def state(self) -> dict[str, Any]:
        """The counts that a checkpoint holds."""
        return {"decisions": self.decisions, "steps": self.steps, "episodes": self.episodes}

    def load_state(self, state: dict[str, Any]) -> None:
        self.decisions, self.steps, self.episodes = (int(state[name]) for name in ("decisions", "steps", "episodes"))
        self._steps_before = self.steps

    def record_rollout(self, groups: int, seconds: float) -> None:
        """This worker has collected rollouts of `groups` groups."""
        self._own_steps += groups * self._source.group * self._source.settings.rollout
        self._own_seconds += seconds
        self.steps += self._source.steps

    def record_returns(self, ended: Tensor, returns: Tensor, values: Tensor) -> None:
        """Record the returns of all workers; `ended` (3,) has episodes, and sums of their rewards and lengths."""
        self._ended = [before + new for before, new in zip(self._ended, ended.tolist(), strict=True)]
        self.episodes += int(ended[0])
        spread = returns.double().var()
        self._explained = 1 - (returns - values).double().var() / spread
        steps = self._source.num_train_samples // self._source.decisions_per_step
        size = (steps, self._source.groups, 1 + len(METRICS))
        self._slots = torch.zeros(size, dtype=torch.float64, device=self._world.device)

    def record_step(self, slot: int, micro_batch: int, figures: Tensor) -> None:
        """Record the METRICS of a micro-batch's decisions, (5, …)."""
        if self._slots.numel():  # empty before the first rollout, when the model is only tested
            self._slots[slot, micro_batch, 0] = figures[0].numel()
            self._slots[slot, micro_batch, 1:] = figures.flatten(1).sum(1)

    def divergence(self, slots: range) -> float:
        """The mean KL divergence of these steps, over all workers."""
        sums = all_reduce_sum(self._world, self._slots[slots.start : slots.stop].clone()).sum((0, 1))
        return float(sums[1] / sums[0])

    def read(self, seconds: float) -> dict[str, Any]:
        """Fields of a `train` line, after so many seconds of training; all ranks call it together."""
        fields: dict[str, Any] = {"env_steps": self.steps, "episodes": self.episodes}
        if self._source.settings.target_kl:
            fields["steps_taken"] = self.steps_taken
        if self._ended[0]:
            count, rewards, lengths = self._ended
            fields |= {"episode_reward": rewards / count, "episode_length": lengths / count}
        if self._slots.numel():
            sums = all_reduce_sum(self._world, self._slots.clone()).sum((0, 1)).tolist()
            fields |= {name: value / max(1.0, sums[0]) for name, value in zip(METRICS, sums[1:], strict=True)}
            fields["explained_variance"] = float(self._explained)  # type: ignore[arg-type]
        own = torch.tensor([self._own_steps, self._own_seconds], dtype=torch.float64, device=self._world.device)
        rollouts = torch.stack(all_gather(self._world, own)).tolist()
        fields["env_steps_per_second"] = divide(self.steps - self._steps_before, seconds)
        fields["rollout_steps_per_second"] = [divide(*steps_and_seconds) for steps_and_seconds in rollouts]
        self._ended, self._own_steps, self._own_seconds, self._steps_before = [0.0, 0.0, 0.0], 0, 0.0, self.steps
        return fields


_LONGEST = 1_000_000  # steps
_GROUP = 32  # episodes that are played as one batch, on any number of workers


class Episodes:
    """The first episode of so many (`size`) environments of a split, each played by one worker."""

    def __init__(self, source: EnvSource, split: str, world: World, size: int) -> None:
        self.source, self.split, self.world, self.size = source, split, world, size
        self.data_location = "played"
        self._groups: dict[int, EnvironmentGroup] = {}

    def close(self) -> None:
        """Nothing to close."""

    def eval_batches(self, batch_size: int, rank: int, workers: int) -> NoReturn:
        """Refused: episodes have no samples."""
        raise RequestError("--task ppo has episodes, not samples with predictions", remedy="multigpu evaluate")

    def play(self, network: Network, policy: Policy, memory: int) -> Iterator[tuple[range, dict[str, Tensor]] | None]:
        """Yield this worker's episodes by groups: their numbers and metrics, (E,) each, of the likeliest actions.

        None is yielded after each step before a group's last one.
        """
        count = -(-self.size // _GROUP)
        rank, workers = self.world.rank, self.world.size
        for number in range(count * rank // workers, count * (rank + 1) // workers):
            numbers = range(number * _GROUP, min((number + 1) * _GROUP, self.size))
            if number not in self._groups:
                self._groups[number] = self.source.make(self.split, numbers, self.world.device)
            yield numbers, (yield from _first_episodes(self._groups[number], network, policy, len(numbers), memory))

    def details(self) -> dict[str, Any]:
        """Details of the first episode, on the worker that played it."""
        return self._groups[0].details() if 0 in self._groups else {}


def _first_episodes(
    environments: EnvironmentGroup, network: Network, policy: Policy, size: int, memory: int
) -> Generator[None, None, dict[str, Tensor]]:
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
        yield
    raise TrainingError(f"an episode of an evaluation did not end in {_LONGEST:,} steps", remedy="a time limit")
