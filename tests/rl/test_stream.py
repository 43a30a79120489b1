"""The stream of micro-batches: who acts where, what is dealt out, and that sequences stay whole."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from multigpu_cli.config.sources import resolve
from multigpu_cli.data.loader import Batch
from multigpu_cli.distributed.world import World
from multigpu_cli.planning.batch import BatchPlan
from multigpu_cli.rl.env_source import open_environments
from multigpu_cli.rl.task import PPO
from multigpu_cli.runtime.precision import Precision
from tests.support.world import CPU

GROUP, STEPS, PARTS = 4, 8, 2


class Counting(nn.Module):
    """Its memory counts the steps of an episode; outputs and value are weighed sums over what it has seen so far."""

    memory_size = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, observations: Tensor, begun: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sums = []
        for seen, first in zip(observations, begun, strict=True):
            memory = memory * (1 - first[:, None])
            memory = torch.stack([memory[:, 0] * self.weight + seen[:, 0], memory[:, 1] + 1], 1)
            sums.append(memory)
        whole = torch.stack(sums)
        return torch.stack([whole[..., 0], -whole[..., 0]], -1), whole[..., 0], memory


class Memoryless(nn.Module):
    memory_size = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 3)

    def forward(self, observations: Tensor, begun: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        said = self.inner(observations)
        return said[..., :2], said[..., 2], memory


def task(model: nn.Module, *sets: str, groups: int = 3, workers: int = 1, rank: int = 0) -> tuple[PPO, BatchPlan]:
    given = [f"task.args.rollout={STEPS}", f"task.args.minibatches={PARTS}", "task.args.passes=2", *sets]
    flags = {"data": "tests.support.toy_env:corridor", "task": "ppo", "num_envs": groups * GROUP, "env_group": GROUP}
    config = resolve(flags, given, None)
    source = open_environments(config)
    made = PPO(source, config.task, **config.task.args)
    made.train_stream(config.data, World(CPU, rank, workers, rank, workers), 7)
    torch.manual_seed(0)
    made.check_model(model, Precision("off", CPU))
    assert source.fixed_batch_sizes is not None
    small, whole = source.fixed_batch_sizes
    plan = BatchPlan(samples=source.num_train_samples, micro_batch=small, global_batch=whole, workers=workers)
    return made, plan


def steps_of(made: PPO, plan: BatchPlan, epoch: int = 0) -> list[list[Batch]]:
    return [list(work) for _, work in made.rollouts.epoch(plan, epoch, 0, made.rollouts.world.rank, 1)]


def test_a_step_has_one_micro_batch_of_each_group_and_a_pass_every_decision_once() -> None:
    made, plan = task(Memoryless())
    steps = steps_of(made, plan)
    assert [[batch.micro_batch_index for batch in work] for work in steps] == [[0, 1, 2]] * 4
    assert all(len(batch) == GROUP * STEPS // PARTS for work in steps for batch in work)
    everything = made.rollouts._rollouts
    for first in (0, PARTS):
        for group in range(3):
            values = torch.cat([steps[first + part][group].targets.values.flatten() for part in range(PARTS)])
            torch.testing.assert_close(values.sort()[0], everything[group].values.flatten().sort()[0])
    assert not torch.equal(steps[0][0].targets.values, steps[PARTS][0].targets.values), "another order in each pass"
    assert torch.cat([batch.sample_indices for work in steps for batch in work]).tolist() == list(range(plan.samples))


def test_advantages_are_normalised_over_the_global_batch() -> None:
    made, plan = task(Memoryless())
    for work in steps_of(made, plan):
        together = torch.cat([batch.targets.advantages.flatten() for batch in work]).double()
        assert float(together.mean()) == pytest.approx(0, abs=1e-6)
        assert float(together.std()) == pytest.approx(1, abs=1e-6)
        assert abs(float(work[0].targets.advantages.mean())) > 1e-3, "and not over each micro-batch"


def test_a_network_with_memory_gets_whole_sequences_and_what_it_remembered_before_them() -> None:
    made, plan = task(Counting())
    steps_of(made, plan)
    before = [collector._memory.clone() for collector in made.rollouts._collectors]
    counted = 0
    for work in steps_of(made, plan, 1)[:PARTS]:
        for batch, rollout in zip(work, made.rollouts._rollouts, strict=True):
            seen = batch.inputs
            assert seen.observations.shape == (STEPS, GROUP // PARTS, 2)
            for column in range(GROUP // PARTS):
                at = [
                    env
                    for env in range(GROUP)
                    if torch.equal(rollout.observations[:, env], seen.observations[:, column])
                ]
                assert len(at) == 1, "in time's order, and of one environment"
                assert torch.equal(before[batch.micro_batch_index][at[0]], seen.memory[column])
                assert torch.equal(rollout.actions[:, at[0]], batch.targets.actions[:, column])
                counted += 1
    assert counted == 3 * GROUP


def test_the_gradient_through_a_rollout_is_that_of_each_episode_by_itself() -> None:
    """The sum of w^k x(t-k) back to the episode's first step; its derivative by hand, environment by environment."""
    model = Counting()
    made, plan = task(model)
    steps_of(made, plan)
    seen = [batch.inputs for batch in steps_of(made, plan, 1)[0]]
    values = torch.cat([model(part.observations.double(), part.begun, part.memory.double())[1] for part in seen], 1)
    values.sum().backward()
    weight, expected = float(model.weight.detach()), 0.0
    begun_within = 0
    for part in seen:
        for column in range(part.begun.shape[1]):
            sum_, derivative = float(part.memory[column, 0]), 0.0
            for step in range(STEPS):
                if part.begun[step, column]:
                    sum_, derivative, begun_within = 0.0, 0.0, begun_within + (step > 0)
                derivative = derivative * weight + sum_
                sum_ = sum_ * weight + float(part.observations[step, column, 0])
                expected += derivative
    assert begun_within, "an episode ends in the middle"
    assert any(bool(part.memory.any()) for part in seen), "and one goes on from the rollout before"
    assert model.weight.grad is not None
    assert float(model.weight.grad) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("model", [Memoryless, Counting])
def test_what_the_policy_says_again_is_what_it_said_during_the_rollout(model: Any) -> None:
    made, plan = task(model().float())
    for work in steps_of(made, plan):
        for batch in work:
            outputs, values, _ = made.rollouts._model(*batch.inputs[:3])
            log_probabilities, _ = made.policy.evaluate_actions(outputs, batch.targets.actions)
            torch.testing.assert_close(log_probabilities, batch.targets.log_probabilities, atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(values, batch.targets.values, atol=1e-6, rtol=1e-5)


def test_workers_have_contiguous_groups_and_some_may_have_none() -> None:
    assert [task(Memoryless(), workers=2, rank=rank)[0].rollouts.mine for rank in (0, 1)] == [range(1), range(1, 3)]
    assert [len(task(Memoryless(), workers=4, rank=rank)[0].rollouts.mine) for rank in range(4)] == [0, 1, 1, 1]


def test_a_pass_that_moves_the_policy_too_far_ends_the_epoch() -> None:
    made, plan = task(Memoryless(), "task.args.target_kl=0.01")
    told = []
    for number, (_, work) in enumerate(made.rollouts.epoch(plan, 0, 0, 0, 1)):
        for batch in work:
            if number:  # the first pass's second step moves
                made.rollouts._model.get_parameter("inner.weight").data.normal_()
            made.loss_sum(made.rollouts._model, batch)
        told.append(made.rollouts.next_step(number, plan))
    assert told == [1, 4]
    assert made.rollouts.samples_seen_at(4, plan) == 2 * plan.global_batch
    assert made.rollouts.optimizer_steps_done_at(4, plan) == 2


class Adopting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.adopted: list[tuple[Tensor, Tensor]] = []

    def adopt(self, mean: Tensor, deviation: Tensor) -> None:
        self.adopted.append((mean.float(), deviation.float()))


def test_observations_are_normalised_by_what_was_seen_before() -> None:
    model = Memoryless()
    model.normalizer = told = Adopting()
    made, plan = task(model, "task.args.normalize_observations=true", "task.args.normalize_rewards=true")
    steps_of(made, plan)
    seen = torch.cat([rollout.observations.flatten(0, 1) for rollout in made.rollouts._rollouts])
    steps_of(made, plan, 1)
    assert told.adopted[0][0].tolist() == [0, 0]
    torch.testing.assert_close(told.adopted[1], (seen.mean(0), seen.std(0, correction=0)))
