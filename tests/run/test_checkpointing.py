"""--checkpoint-every in minutes: by the clock of whichever rank is the first, agreed by all; and what is kept."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from multigpu_cli.config.schema import CheckpointConfig
from multigpu_cli.monitor import journal
from multigpu_cli.run import run as run_module
from multigpu_cli.run.run import CheckpointSchedule
from tests.support.run_training import run_training

RUN: dict[str, Any] = {"save_dir": "run", "batch_size": 10, "epochs": 8}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the run's clock shows; only where checkpoints are timed."""
    now = [0.0]

    class Time:
        monotonic = staticmethod(lambda: now[0])
        perf_counter = staticmethod(time.perf_counter)

    monkeypatch.setattr(run_module, "time", Time)
    return now


def test_minutes_count_from_the_last_checkpoint(clock: list[float]) -> None:
    every = CheckpointSchedule(CheckpointConfig(every="10m"))
    clock[0] = 599
    assert not every.overdue()
    clock[0] = 600
    assert every.overdue()
    every.mark_saved()
    assert not every.overdue()
    clock[0] = 1200
    assert every.overdue()
    assert not every.update_due(6, 7, epoch_ended=True), "minutes take the place of the epochs"


def test_what_is_due_stays_due_until_it_is_saved() -> None:
    """A rollout is not cut in its middle: what falls due there is saved at its end."""
    every = CheckpointSchedule(CheckpointConfig(every="3"))
    assert [every.update_due(step - 1, step, epoch_ended=False) for step in (1, 2, 3, 4, 5)] == [
        False,
        False,
        True,
        True,
        True,
    ]
    every.mark_saved()
    assert [every.update_due(step - 1, step, epoch_ended=True) for step in (5, 6)] == [False, True]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_saves_by_the_minute(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    """Every look at the clock costs half a minute: overdue is asked once a step, and saved resets it."""
    monkeypatch.chdir(tmp_path)

    def ticking() -> float:
        clock[0] += 30.0
        return clock[0]

    monkeypatch.setattr("multigpu_cli.run.run.time.monotonic", staticmethod(ticking))
    steps = 48 // workers
    slow = {"OWN_PAUSE": "0.08"} if workers > 1 else {}
    assert run_training(workers, **RUN, checkpoint_every="1m", keep="99", environ=slow).error == ""
    saved = [event["step"] for event in journal.read_events("run/journal.jsonl") if event["event"] == "checkpoint"]
    assert saved[-1] == steps
    if workers == 1:
        assert saved == list(range(2, steps + 1, 2))
    else:
        assert len(saved) >= 2, "they meet every half second or so, and at the first step"


def test_the_best_weights_outlive_the_checkpoint_they_came_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--keep 1: the best evaluation was many checkpoints ago, and best.pt still holds its weights."""
    monkeypatch.chdir(tmp_path)
    best = run_training(**RUN | {"keep": "99", "save_dir": "all"}).summary["best"]
    ended = run_training(**RUN, keep="1")
    assert ended.summary["faults"] == []
    assert ended.summary["best"]["step"] == best["step"] < 48
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["step_00000048"]
    found = torch.load("run/best.pt", weights_only=True)["model"]
    then = torch.load(f"all/checkpoints/step_{best['step']:08d}/state.pt", weights_only=True)["model"]
    assert all(torch.equal(found[name], then[name]) for name in then)
