"""Environments of gymnasium: the same episodes whoever steps them, and brought back by telling them again."""

import sys
from typing import Any

import pytest
import torch

from multigpu_cli.environments.base import Box, Discrete
from multigpu_cli.environments.gym import GymGroup
from multigpu_cli.errors import RequestError
from tests.support.world import CPU

gymnasium = pytest.importorskip("gymnasium")


def cartpole(*numbers: int, hide: Any = ()) -> GymGroup:
    return GymGroup("CartPole-v1", numbers, 5, CPU, hide)


def walk(environments: GymGroup, steps: int, seed: int = 0) -> list[Any]:
    """Random actions: (observation, reward, terminated, last observation) of the first environment at each step."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(steps):
        one = torch.randint(2, (1,), generator=generator)
        stepped = environments.step(one.expand(len(environments._all)))
        found.append([part[0].tolist() for part in stepped])
    return found


def test_an_environment_does_not_know_in_which_group_it_is() -> None:
    alone, among = cartpole(7), cartpole(7, 3, 1)
    assert torch.equal(alone.reset()[0], among.reset()[0])
    assert walk(alone, 80) == walk(among, 80)
    assert not torch.equal(cartpole(7).reset(), cartpole(8).reset())


def test_where_an_episode_ends_the_true_last_observation_stands_beside_the_next_ones_first() -> None:
    environments = cartpole(0)
    environments.reset()
    ended = next(row for row in walk(environments, 100) if row[2])
    observation, reward, terminated, truncated, last = ended
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert abs(last[2]) > 0.2095 or abs(last[0]) > 2.4, "the pole has fallen"
    assert max(map(abs, observation)) < 0.06, "a new episode"


def test_a_time_limit_truncates() -> None:
    environments = GymGroup("CartPole-v1", (0,), 5, CPU, options={"max_episode_steps": 3})
    environments.reset()
    assert [row[2:4] for row in walk(environments, 3)] == [[False, False], [False, False], [False, True]]


def test_a_state_goes_on_exactly_in_other_objects() -> None:
    before, after = cartpole(4, 2), cartpole(4, 2)
    before.reset()
    walk(before, 57)
    state = before.state()
    observation, anew = after.load_state(state)
    assert anew == 0
    assert torch.equal(observation, state["observation"])
    assert walk(before, 60, seed=1) == walk(after, 60, seed=1)


def test_an_episode_that_can_not_be_told_again_is_begun_anew() -> None:
    before, after = cartpole(4, 2), cartpole(4, 2)
    before.reset()
    walk(before, 5)
    state = before.state()
    state["observation"][1, 0] += 1  # as if its seed did not govern it
    observation, anew = after.load_state(state)
    assert anew == 1
    assert torch.equal(observation[0], state["observation"][0])
    assert torch.equal(observation[1], cartpole(2).reset()[0])


def test_velocities_can_be_hidden() -> None:
    environments = cartpole(0, hide=[1, 3])
    assert environments.observation_shape == (2,)
    assert torch.equal(environments.reset()[0], cartpole(0).reset()[0, [0, 2]])
    with pytest.raises(RequestError, match=r"data\.args\.hide: \[4\]"):
        cartpole(0, hide=[4])


def test_real_actions_and_what_comes_back() -> None:
    environments = GymGroup("Pendulum-v1", (0, 1), 5, CPU)
    assert environments.action == Box((1,), (-2.0,), (2.0,))
    environments.reset()
    environments.step(torch.tensor([[0.3], [-1.7]]))
    again = GymGroup("Pendulum-v1", (0, 1), 5, CPU)
    assert again.load_state(environments.state())[1] == 0


def test_observations_that_are_numbers_become_vectors() -> None:
    environments = GymGroup("CliffWalking-v1", (0,), 5, CPU)
    assert environments.observation_shape == (48,)
    assert environments.reset().sum() == 1
    assert environments.action == Discrete(4)


@pytest.mark.parametrize(
    ("id", "options", "words"),
    [("CartPol-v1", {}, "gym:CartPol-v1"), ("CartPole-v1", {"speed": 3}, "speed")],
)
def test_what_gymnasium_does_not_make(id: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        GymGroup(id, (0,), 5, CPU, options=options)


def test_without_gymnasium_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(RequestError, match=r"gymnasium is not installed\n.*multigpu-cli\[rl\]"):
        cartpole(0)
