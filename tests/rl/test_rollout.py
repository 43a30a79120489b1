"""What a rollout writes down, and where the next one goes on."""

import torch
from torch import Tensor

from multigpu_cli.environments.base import Discrete
from multigpu_cli.rl.policy import build_policy
from multigpu_cli.rl.stream import Collector
from tests.support.toy_env import Corridor
from tests.support.world import CPU

POLICY = build_policy(Discrete(2))


def collector(limit: int = 5) -> Collector:
    return Collector(Corridor((0, 1, 2), 3, CPU, limit, False), 0, 3, 1, CPU)


def place(observations: Tensor, begun: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A policy without preferences; an observation is worth its place, and the memory counts an episode's steps."""
    assert not torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled(), "a table that the network keeps has to take part in training"
    memory = memory * (1 - begun[-1][:, None]) + 1
    return torch.zeros(*begun.shape, 2), observations[..., 0], memory


def count(observations: Tensor, begun: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `place`, but an observation is worth its number within its episode, which only the memory tells."""
    outputs, _, memory = place(observations, begun, memory)
    return outputs, memory.T, memory


def noise(steps: int) -> Tensor:
    return POLICY.sample_noise((steps, 3), torch.Generator().manual_seed(0))


def test_a_rollout_is_what_happened() -> None:
    environments = Corridor((0, 1, 2), 3, CPU, 5, False)
    seen, draws = environments.reset(), noise(40)
    rollout, ended = collector().collect(place, POLICY, draws)
    begun, episodes, lengths = torch.ones(3), 0, 0
    for step in range(40):
        assert torch.equal(rollout.observations[step], seen)
        assert torch.equal(rollout.begun[step], begun)
        assert torch.equal(rollout.values[step], seen[:, 0])
        actions = draws[step].argmax(-1)
        assert torch.equal(rollout.actions[step], actions)
        stepped = environments.step(actions)
        assert torch.equal(rollout.rewards[step], stepped.reward)
        assert torch.equal(rollout.terminated[step], stepped.terminated)
        assert torch.equal(rollout.truncated[step], stepped.truncated)
        cut = stepped.truncated
        assert torch.equal(rollout.cut_values[step][cut], stepped.last_observation[cut, 0]), "not the next episode's"
        over = stepped.terminated | stepped.truncated
        episodes, lengths = episodes + int(over.sum()), lengths + int(environments._ended_after[over].sum())
        seen, begun = stepped.observation, over.float()
    assert bool(rollout.truncated.any())
    assert bool(rollout.terminated.any())
    assert torch.equal(rollout.after, seen[:, 0])
    torch.testing.assert_close(rollout.log_probabilities, torch.full((40, 3), 0.5).log())
    assert (float(ended[0]), float(ended[2])) == (episodes, lengths)


def test_what_an_episode_was_cut_off_from_is_judged_with_the_memory_of_that_episode() -> None:
    rollout, _ = collector(limit=5).collect(count, POLICY, noise(40))
    cut = rollout.truncated & ~rollout.terminated
    assert bool(cut.any())
    assert rollout.cut_values[cut].unique().tolist() == [6.0], "the observation after the fifth step, of no new episode"
    over = rollout.terminated[-1] | rollout.truncated[-1]
    assert torch.equal(rollout.after, torch.where(over, 1.0, rollout.values[-1] + 1))


def test_two_rollouts_are_one_cut_in_two_and_so_is_one_that_comes_from_a_state() -> None:
    draws = noise(24)
    whole, _ = collector().collect(place, POLICY, draws)
    first = collector()
    first.collect(place, POLICY, draws[:11])
    second = collector()
    assert second.load_state(first.state()) == 0
    for each in (first, second):
        rest, _ = each.collect(place, POLICY, draws[11:])
        assert torch.equal(rest.observations, whole.observations[11:])
        assert torch.equal(rest.begun, whole.begun[11:])
        assert rest.memory.tolist() != [[0.0]] * 3


def test_promised_rewards_run_on_over_rollouts_and_end_with_an_episode() -> None:
    each, expected = collector(), torch.zeros(3)
    for _ in range(2):
        rollout, _ = each.collect(place, POLICY, noise(9))
        sums = each.discount_returns(rollout, 0.9)
        for step in range(9):
            expected = expected * 0.9 + rollout.rewards[step]
            torch.testing.assert_close(sums[step], expected)
            expected = torch.where(rollout.terminated[step] | rollout.truncated[step], 0.0, expected)
