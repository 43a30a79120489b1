"""What the recipes of PPO reach, seed by seed: the best weights of a run in 100 episodes that it has not seen."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launcher import alone

pytest.importorskip("gymnasium")
SEEDS = (1, 2, 3)


def measure_reward(folder: Path, **flags: Any) -> float:
    command = alone("--json", save_dir=folder / "run", **flags)
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=True)
    summary = json.loads(done.stdout)
    assert (summary["status"], summary["best"]["reward"] >= summary["final"]["val_reward"]) == ("completed", True)
    return float(summary["final"]["test_reward"])


@pytest.mark.quality
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_pole_is_balanced_within_300_000_steps(workers: int, seed: int, tmp_path: Path) -> None:
    launch: dict[str, Any] = {"multi_gpu": "ddp", "nproc_per_node": 2} if workers == 2 else {"multi_gpu": "none"}
    assert measure_reward(tmp_path, config="ppo_cartpole", seed=seed, **launch) >= 475


@pytest.mark.quality
@pytest.mark.parametrize("seed", SEEDS)
def test_without_velocities_it_takes_a_memory(seed: int, tmp_path: Path) -> None:
    request: dict[str, Any] = {"config": "ppo_cartpole_masked", "seed": seed, "multi_gpu": "none"}
    assert measure_reward(tmp_path / "lstm", **request) >= 400
    assert measure_reward(tmp_path / "mlp", **request, model="actor-critic") < 200
