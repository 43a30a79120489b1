"""PPO's stream of micro-batches: a rollout at the start of each epoch, then its optimizer steps."""

import time
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from multigpu_cli.data.loader import Batch, StepWork
from multigpu_cli.distributed.collectives import all_reduce_sum
from multigpu_cli.distributed.world import World
from multigpu_cli.planning.batch import BatchPlan, make_key
from multigpu_cli.rl.env_source import EnvSource
from multigpu_cli.rl.metrics import PPOMetrics
from multigpu_cli.rl.objective import RolloutBatch, RunningMoments, advantages, sum_moments
from multigpu_cli.rl.policy import Policy
from multigpu_cli.rl.rollout import Collector, Rollout
from multigpu_cli.runtime.module_state import eval_mode
from multigpu_cli.runtime.precision import Precision

_CHOICES, _ORDER = 0xAC7, 0x08D  # keep these random streams apart


class PolicyInput(NamedTuple):
    """Inputs of the model.

    Attributes:
        observations, begun: (T, n, …), whole sequences, or (1, n, …) decisions in any order without memory.
        memory: (n, S) before the first of the T steps.
        slot: the optimizer step within its epoch.
    """

    observations: Tensor
    begun: Tensor
    memory: Tensor
    slot: int


class RolloutStream:
    """One worker's stream: acts in its groups of environments, and divides their decisions into micro-batches.

    A worker's groups are a contiguous block, and micro-batch g of every step holds decisions of group g, so no
    observation is communicated: only rewards and values, from which every rank computes the same statistics.

    Args:
        source: the environments.
        seed: the run's.
        moved: called at each step of the environments.
    """

    resumable_only_at_epoch = (
        True  # what was decided belongs to the weights of that moment: an epoch is not begun in its middle
    )

    def __init__(
        self, source: EnvSource, policy: Policy, world: World, seed: int, moved: Callable[[], None] = lambda: None
    ) -> None:
        self.source, self.policy, self.world, self.seed, self._moved = source, policy, world, seed, moved
        self.size, self.data_location = (
            source.num_train_samples,
            f"made by the policy in {source.environments} environments",
        )
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

    def close(self) -> None:
        """Nothing to close."""

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
        """The steps of an update: the layout of each, and this worker's micro-batches.

        Args:
            epoch: the update.
            start: the first step; the epoch begins with a new rollout.
        """
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
        """The step after this one, or the next epoch's first if a pass has moved the policy too far.

        All ranks call it together."""
        within, settings = step % plan.steps_per_epoch, self.source.settings
        self.metrics.decisions += plan.num_samples(within)
        if not settings.target_kl or (within + 1) % self.source.minibatches:
            return step + 1
        self._far = (
            self.metrics.divergence(range(within + 1 - self.source.minibatches, within + 1)) > settings.target_kl
        )
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

        Args:
            groups: the states of all groups, in order.
            shared: the rest of `state` of any rank.
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
        with eval_mode(self._model):
            for collector in self._collectors:
                generator = torch.Generator().manual_seed(make_key(self.seed, _CHOICES, epoch, collector.number))
                noise = self.policy.sample_noise(shape, generator).to(self.world.device)
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
            better = advantages(
                rollout.rewards / scale,
                rollout.values,
                rollout.after,
                rollout.terminated,
                rollout.truncated,
                rollout.cut_values,
                gamma=settings.gamma,
                gae_lambda=settings.gae_lambda,
            )
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
