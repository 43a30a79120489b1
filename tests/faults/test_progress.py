"""What moves is no hang: whole runs of two ranks, of which rank 0 takes its time, and rank 1 waits for it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from multigpu_cli.checkpoint import files
from tests.support.run_training import Ended, run_training
from tests.support.slow_parts import pause

TIMEOUT, PAUSE = 1.5, 0.35  # seconds; five pauses in a row are longer than the timeout
PPO = {
    "data": "tests.support.slow_parts:trudging",
    "task": "ppo",
    "model": "tests.support.toy_env:net",
    "num_envs": 4,
    "env_group": 2,
}
PPO_SETS = [f"task.args.{word}" for word in ("rollout=6", "passes=1", "minibatches=2", "evaluate_episodes=1")]
WAYS: dict[str, tuple[dict[str, Any], list[str], int]] = {  # flags, settings, and the piece at which it stands
    "writing": ({"max_steps": 2, "checkpoint_every": "1000"}, [], 4),
    "acting": (PPO | {"epochs": 2, "warmup_epochs": 0}, PPO_SETS, 9),
    # five batches are evaluated before step one, when --hang-timeout does not hold yet
    "evaluating": ({"model": "tests.support.slow_parts:evaluated", "epochs": 1, "batch_size": 1}, [], 9),
}


@pytest.fixture(params=["writing", *(pytest.param(name, marks=pytest.mark.slow) for name in ("acting", "evaluating"))])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "writing":
        monkeypatch.setattr(files, "PIECE", 4096, raising=False)
        flush, pieces = os.fsync, iter(range(1, 10**6))

        def slowly(file: int) -> None:
            pause(next(pieces))
            flush(file)

        monkeypatch.setattr(os, "fsync", slowly)
    return str(request.param)


def run(way: str, folder: Path, *, pause: float, stands: int = 0) -> Ended:
    flags, sets, _ = WAYS[way]
    environ = {"SLOW": str(pause), "STANDS": str(stands)}
    return run_training(2, sets=sets, save_dir=str(folder), hang_timeout=TIMEOUT, environ=environ, **flags)


def test_a_rank_that_is_slow_and_moves_is_waited_for(way: str, tmp_path: Path) -> None:
    ended = run(way, tmp_path / "run", pause=PAUSE)
    assert (ended.error, ended.summary.get("status")) == ("", "completed")


def test_a_rank_that_stands_still_is_ended(way: str, tmp_path: Path) -> None:
    ended = run(way, tmp_path / "run", pause=0, stands=WAYS[way][2])
    assert ended.killed == [0, 1]
    assert "no progress for" in json.loads((tmp_path / "run" / "summary.json").read_text())["error"]
