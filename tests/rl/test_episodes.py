"""Evaluation episodes: one of each environment, and nothing of the next."""

import pytest
import torch
from torch import Tensor

from multigpu_cli.distributed.world import World
from multigpu_cli.errors import TrainingError
from multigpu_cli.rl import metrics
from multigpu_cli.rl.metrics import Episodes
from multigpu_cli.rl.policy import build_policy
from tests.rl.test_env_source import open_env
from tests.support.world import CPU


def rightwards(observations: Tensor, begun: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.tensor([0.0, 1.0]).expand(*begun.shape, 2), begun, memory


def play_twice(rank: int = 0, workers: int = 1) -> list[tuple[range, dict[str, Tensor]]]:
    source = open_env("task.args.evaluate_episodes=70")
    made = Episodes(source, "val", World(CPU, rank, workers, rank, workers), 70)
    first, again = (
        [group for group in made.play(rightwards, build_policy(source.action), 0) if group] for _ in range(2)
    )
    assert [numbers for numbers, _ in first] == [numbers for numbers, _ in again]
    assert all(torch.equal(one["length"], two["length"]) for (_, one), (_, two) in zip(first, again, strict=True))
    return first


def test_each_environment_plays_its_first_episode_once_and_the_same_every_time() -> None:
    found = play_twice()
    assert [numbers for numbers, _ in found] == [range(32), range(32, 64), range(64, 70)]
    places = open_env().make("val", range(70), CPU).reset()[:, 0] * 8
    lengths = torch.cat([figures["length"] for _, figures in found])
    assert torch.equal(lengths, (8 - places).double()), "straight to the end"
    rewards = torch.cat([figures["reward"] for _, figures in found])
    torch.testing.assert_close(rewards, 1 - 0.01 * lengths, atol=1e-6, rtol=0)
    assert torch.equal(torch.cat([figures["half_length"] for _, figures in found]), lengths / 2)


def test_workers_share_them_out() -> None:
    assert [[numbers for numbers, _ in play_twice(rank, 2)] for rank in (0, 1)] == [
        [range(32)],
        [range(32, 64), range(64, 70)],
    ]


def test_one_that_does_not_end_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_LONGEST", 3)
    with pytest.raises(TrainingError, match="did not end in 3 steps"):
        play_twice()
