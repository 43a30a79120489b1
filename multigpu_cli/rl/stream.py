"""PPO's stream of micro-batches: a rollout at the start of each epoch, then its optimizer steps."""

import time
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from multigpu_cli.data.loader import Batch, BatchStream, StepWork
from multigpu_cli.distributed.world import World, all_reduce_sum
from multigpu_cli.environments.base import EnvironmentGroup
from multigpu_cli.planning.batch import BatchPlan, make_key
from multigpu_cli.rl.env_source import EnvSource
from multigpu_cli.rl.metrics import PPOMetrics
from multigpu_cli.rl.objective import Rollout, RolloutBatch, RunningMoments, advantages, sum_moments
from multigpu_cli.rl.policy import Network, Policy
from multigpu_cli.runtime.module_state import eval_mode
from multigpu_cli.runtime.precision import Precision

_CHOICES, _ORDER = 0xAC7, 0x08D  # keep these random streams apart
_STATE = ("begun", "memory", "tally", "promised")


class Collector:
    """A group of environments, reset here, and the policy's memory in them; `number` counts over all workers."""

    def __init__(
        self, environments: EnvironmentGroup, number: int, size: int, memory: int, device: torch.device
    ) -> None:
        self.environments, self.number, self._size, self._device = environments, number, size, device
        self._observation = environments.reset()
        self._begun = torch.ones(size, device=device)
        self._memory = torch.zeros(size, memory, device=device)
        self._tally = torch.zeros(2, size, dtype=torch.float64, device=device)  # reward and length so far
        self._promised = torch.zeros(size, device=device)  # discounted sum of the rewards so far

    def state(self) -> dict[str, Any]:
        """Copies of what `load_state` needs."""
        state = {name: getattr(self, f"_{name}").clone() for name in _STATE}
        return state | {"environments": self.environments.state()}

    def load_state(self, state: dict[str, Any]) -> int:
        """Restore a state; returns how many environments had to restart their episode."""
        self._observation, restarted = self.environments.load_state(state["environments"])
        for name in _STATE:
            setattr(self, f"_{name}", state[name].to(self._device))
        return restarted

    def discount_returns(self, rollout: Rollout, gamma: float) -> Tensor:
        """(T, E): at each step of its last rollout, the discounted sum of the episode's rewards so far."""
        sums = torch.empty_like(rollout.rewards)
        over = rollout.terminated | rollout.truncated
        for step, reward in enumerate(rollout.rewards):
            sums[step] = self._promised * gamma + reward
            self._promised = torch.where(over[step], 0.0, sums[step])
        return sums

    def collect(self, network: Network, policy: Policy, noise: Tensor) -> tuple[Rollout, Tensor]:
        """Take T steps, choosing actions with the noise, (T, E, *policy.noise).

        Also returns (3,) of the episodes that ended in it: their number, and sums of rewards and lengths.
        """
        steps, size = len(noise), self._size
        rollout = self._allocate(steps, policy)
        all_outputs = torch.zeros(steps, size, policy.outputs, device=self._device)
        ended = torch.zeros(3, dtype=torch.float64, device=self._device)
        with torch.no_grad():
            for step in range(steps):
                outputs, values, memory = self._forward(network, self._observation, self._begun)
                actions = policy.choose_actions(outputs, noise[step])
                rollout.observations[step], rollout.begun[step] = self._observation, self._begun
                all_outputs[step], rollout.actions[step], rollout.values[step] = outputs, actions, values
                stepped = self.environments.step(policy.to_env_actions(actions))
                self._memory = memory
                over = stepped.terminated | stepped.truncated
                rollout.rewards[step] = stepped.reward
                rollout.terminated[step], rollout.truncated[step] = stepped.terminated, stepped.truncated
                self._tally[0] += stepped.reward
                self._tally[1] += 1
                if bool(over.any()):
                    if bool(stepped.truncated.any()):
                        going_on = torch.zeros(size, device=self._device)
                        rollout.cut_values[step] = self._forward(network, stepped.last_observation, going_on)[1]
                    ended[0] += over.sum()
                    ended[1:] += self._tally[:, over].sum(1)
                    self._tally[:, over] = 0
                self._observation, self._begun = stepped.observation, over.to(torch.float32)
            rollout.log_probabilities.copy_(policy.evaluate_actions(all_outputs, rollout.actions)[0])
            rollout.after.copy_(self._forward(network, self._observation, self._begun)[1])
        return rollout, ended

    def _forward(self, network: Network, observation: Tensor, begun: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        outputs, values, memory = network(observation[None], begun[None], self._memory)
        return outputs[0].float(), values[0].float(), memory

    def _allocate(self, steps: int, policy: Policy) -> Rollout:
        size, device = self._size, self._device

        def room(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(steps, size, *shape, dtype=dtype, device=device)

        return Rollout(
            observations=room(*self.environments.observation_shape),
            begun=room(),
            actions=room(*policy.shape, dtype=policy.dtype),
            log_probabilities=room(),
            values=room(),
            rewards=room(),
            terminated=room(dtype=torch.bool),
            truncated=room(dtype=torch.bool),
            cut_values=room(),
            memory=self._memory.clone(),
            after=torch.zeros(size, device=device),
        )


class PolicyInput(NamedTuple):
    """Inputs of the model; `slot` is the optimizer step within its epoch."""

    observations: Tensor  # (T, n, …), whole sequences, or (1, n, …) decisions in any order without memory
    begun: Tensor  # likewise
    memory: Tensor  # (n, S) before the first of the T steps
    slot: int


class RolloutStream(BatchStream):
    """One worker's stream: acts in its groups of environments, and divides their decisions into micro-batches.

    A worker's groups are a contiguous block, and micro-batch g of every step holds decisions of group g, so no
    observation is communicated: only rewards and values, from which every rank computes the same statistics.
    """

    resumable_only_at_epoch = True  # what was decided belongs to the weights of that moment

    def __init__(
        self, source: EnvSource, policy: Policy, world: World, seed: int, moved: Callable[[], None] = lambda: None
    ) -> None:
        self.source, self.policy, self.world, self.seed, self._moved = source, policy, world, seed, moved
        self.size = source.num_train_samples
        self.data_location = f"made by the policy in {source.environments} environments"
        groups = source.groups
        self.mine = range(groups * world.rank // world.size, groups * (world.rank + 1) // world.size)
        self.metrics = PPOMetrics(source, world)
        self._seen = RunningMoments(prod(source.input_shape))
        self._paid = RunningMoments(1)
        self._collectors: list[Collector] = []
        self._rollouts: list[Rollout] = []
        self._advantages = self._returns = torch.empty(0)  # (groups, T, E) of all workers
        self._orders = self._shift = self._scale = torch.empty(0)
        self._far = False  # the epoch has moved the policy too far and is over

    def start(self, model: nn.Module, precision: Precision) -> None:
        """Take the model, and create the environments of this worker."""
        self._model, self._precision = model, precision
        self._memory = int(model.memory_size)  # type: ignore[arg-type]
        size, device = self.source.group, self.world.device
        for number in self.mine:
            environments = self.source.make("train", range(number * size, (number + 1) * size), device)
            self._collectors.append(Collector(environments, number, size, self._memory, device))

    def sample_order(self, epoch: int) -> Tensor:
        """(samples,) int64: decisions are numbered in the order of training."""
        return torch.arange(self.size)

    def eval_batches(self, batch_size: int, rank: int, workers: int) -> Iterator[Batch]:
        """One batch of zeros, to test the model before the first rollout."""
        steps = self.source.settings.rollout if batch_size % self.source.settings.rollout == 0 else 1
        shape, device = (steps, batch_size // steps) if self._memory else (1, batch_size), self.world.device
        nothing = torch.zeros(shape, device=device)
        actions = torch.zeros(*shape, *self.policy.shape, dtype=self.policy.dtype, device=device)
        observations = torch.zeros(*shape, *self.source.input_shape, device=device)
        seen = PolicyInput(observations, nothing, torch.zeros(shape[1], self._memory, device=device), 0)
        yield Batch(seen, RolloutBatch(actions, *[nothing] * 4), torch.arange(batch_size), 0)

    def epoch(
        self, plan: BatchPlan, epoch: int, start: int, rank: int, replicas_per_process: int
    ) -> Iterator[StepWork]:
        """The steps of an update from step `start` on: each with its layout and this worker's micro-batches."""
        self._collect(epoch)
        self._far = False
        for step in range(start, plan.steps_per_epoch):
            if self._far:
                return
            if step == start or step % self.source.minibatches == 0:
                self._deal(epoch, step // self.source.minibatches)
            layout = plan.layout(epoch * plan.steps_per_epoch + step, rank, replicas_per_process)
            yield layout, (self._batch(index, step, torch.arange(first, stop)) for index, first, stop in layout.passes)

    def next_step(self, step: int, plan: BatchPlan) -> int:
        """The step after this one, or the next epoch's first if a pass has moved the policy too far; collective."""
        within, settings = step % plan.steps_per_epoch, self.source.settings
        self.metrics.decisions += plan.num_samples(within)
        if not settings.target_kl or (within + 1) % self.source.minibatches:
            return step + 1
        last_pass = range(within + 1 - self.source.minibatches, within + 1)
        self._far = self.metrics.divergence(last_pass) > settings.target_kl
        return step - within + plan.steps_per_epoch if self._far else step + 1

    def optimizer_steps_done_at(self, step: int, plan: BatchPlan) -> int:
        """Optimizer steps up to this place in the schedule, without those that target_kl skipped."""
        return self.metrics.steps_taken

    def samples_seen_at(self, step: int, plan: BatchPlan) -> int:
        """Decisions in all optimizer steps; one counts in every pass."""
        return self.metrics.decisions

    def state(self) -> dict[str, Any]:
        """This worker's state, for `load_state`."""
        return {
            "groups": [collector.state() for collector in self._collectors],
            "seen": self._seen.state,
            "paid": self._paid.state,
            "told": self.metrics.state(),
        }

    def load_state(self, groups: list[dict[str, Any]], shared: dict[str, Any]) -> int:
        """Restore a state; returns how many environments of this worker had to restart their episode.

        `groups` has the states of all groups, in order, and `shared` the rest of `state` of any rank.
        """
        self._seen.state, self._paid.state = shared["seen"], shared["paid"]
        self.metrics.load_state(shared["told"])
        return sum(collector.load_state(groups[collector.number]) for collector in self._collectors)

    def _collect(self, epoch: int) -> None:
        """Collect one rollout in every group, and compute advantages and returns on all ranks."""
        settings, shape = self.source.settings, (self.source.settings.rollout, self.source.group)
        if settings.normalize_observations:
            self._model.normalizer.adopt(self._seen.mean, self._seen.deviation)  # type: ignore[union-attr, operator]
        began, self._rollouts, sums = time.perf_counter(), [], []
        for collector in self._collectors:
            generator = torch.Generator().manual_seed(make_key(self.seed, _CHOICES, epoch, collector.number))
            noise = self.policy.sample_noise(shape, generator).to(self.world.device)
            with eval_mode(self._model):  # restores buffers: the next group may be another rank's
                rollout, ended = collector.collect(self._network, self.policy, noise)
                sums.append(torch.cat([ended, self._moments(collector, rollout)]))
            self._rollouts.append(rollout)
        self.metrics.record_rollout(len(self.mine), time.perf_counter() - began)
        sizes = [3, self._seen.state.numel(), self._paid.state.numel()]
        ended, seen, paid = self._all_reduce_groups(sums, (sum(sizes),)).split(sizes, 1)
        self._seen.add(seen)
        self._paid.add(paid)
        self._compute_advantages()
        self.metrics.record_returns(ended.sum(0), self._returns, self._returns - self._advantages)

    def _network(self, observations: Tensor, begun: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self._moved()
        with self._precision.autocast():
            return self._model(observations, begun, memory)  # type: ignore[no-any-return]

    def _moments(self, collector: Collector, rollout: Rollout) -> Tensor:
        """This rollout's contribution to the running statistics; zeros for those that are not used."""
        settings, device = self.source.settings, self.world.device
        seen, paid = (torch.zeros_like(moments.state) for moments in (self._seen, self._paid))
        if settings.normalize_observations:
            seen = sum_moments(rollout.observations.flatten(0, 1).flatten(1))
        if settings.normalize_rewards:
            paid = sum_moments(collector.discount_returns(rollout, settings.gamma).view(-1, 1))
        return torch.cat([seen.to(device), paid.to(device)])

    def _compute_advantages(self) -> None:
        """Advantages and returns of all workers' decisions: (groups, T, E) each, on every rank."""
        settings, results = self.source.settings, []
        for rollout in self._rollouts:
            scale = float(self._paid.deviation) if settings.normalize_rewards else 1.0
            better = advantages(rollout, settings, scale)
            results.append(torch.stack([better, better + rollout.values]))
        shape = (2, settings.rollout, self.source.group)
        self._advantages, self._returns = self._all_reduce_groups(results, shape, torch.float32).unbind(1)

    def _all_reduce_groups(
        self, values: list[Tensor], shape: tuple[int, ...], dtype: torch.dtype = torch.float64
    ) -> Tensor:
        """(groups, *shape): the values of all workers' groups on every rank; only zeros are added to each."""
        slots = torch.zeros(self.source.groups, *shape, dtype=dtype, device=self.world.device)
        for number, value in zip(self.mine, values, strict=True):
            slots[number] = value
        return all_reduce_sum(self.world, slots)

    def _deal(self, epoch: int, pass_: int) -> None:
        """Shuffle the decisions of each group into the minibatches of a pass, and normalize advantages in each.

        Without memory a minibatch holds any decisions, with memory whole sequences of some environments.
        """
        group, steps, parts = self.source.group, self.source.settings.rollout, self.source.minibatches
        dealt = []
        for number in range(self.source.groups):
            generator = torch.Generator().manual_seed(make_key(self.seed, _ORDER, epoch, pass_, number))
            if self._memory:
                columns = torch.randperm(group, generator=generator).view(parts, 1, -1)
                dealt.append(torch.arange(steps).view(1, -1, 1) * group + columns)
            else:
                dealt.append(torch.randperm(steps * group, generator=generator).view(parts, 1, -1))
        self._orders = torch.stack(dealt).to(self.world.device)  # (groups, parts, T or 1, n)
        if self.source.settings.normalize_advantages:
            flat = self._orders.flatten(1)
            values = self._advantages.flatten(1).gather(1, flat).view(*self._orders.shape[:2], -1).double()
            deviation, mean = torch.std_mean(values, (0, 2))
            self._shift, self._scale = mean.float(), (deviation + 1e-8).float()

    def _batch(self, number: int, slot: int, indices: Tensor) -> Batch:
        rollout, part = self._rollouts[number - self.mine.start], slot % self.source.minibatches
        order = self._orders[number, part]
        at = order.flatten()

        def picked(values: Tensor) -> Tensor:
            return values.flatten(0, 1).index_select(0, at).view(*order.shape, *values.shape[2:])

        memory = rollout.memory[order[0]] if self._memory else rollout.memory.new_zeros(order.shape[1], 0)
        better = picked(self._advantages[number])
        if self.source.settings.normalize_advantages:
            better = (better - self._shift[part]) / self._scale[part]
        decisions = RolloutBatch(
            picked(rollout.actions),
            picked(rollout.log_probabilities),
            picked(rollout.values),
            better,
            picked(self._returns[number]),
        )
        return Batch(
            PolicyInput(picked(rollout.observations), picked(rollout.begun), memory, slot), decisions, indices, number
        )
