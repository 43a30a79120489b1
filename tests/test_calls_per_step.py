"""The CPU time of a step that its spread hides: how many functions it calls, counted by cProfile."""

import cProfile
import pstats
from pathlib import Path
from typing import Any

import pytest

from multigpu_cli import engine
from tests.support.run_training import run_training

CALLS = 295
"""What an MLP's step of one process takes, with torch's own calls; it may fall, and then falls here too.

What comes at log lines and the like is left out: ten more.
"""


def test_a_step_calls_no_more_functions_than_it_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile, steps, train_step = cProfile.Profile(), range(200, 600), engine.train_step

    def count(*args: Any) -> Any:
        step = args[1].step
        if step == steps.start:
            profile.enable()
        elif step == steps.stop:
            profile.disable()
            pstats.Stats(profile).dump_stats(tmp_path / "calls")
        return train_step(*args)

    monkeypatch.setattr(engine, "train_step", count)
    settings: dict[str, Any] = {"data": "synthetic", "sets": ["data.args.train=40000", "data.args.shape=[64]"]}
    ended = run_training(save_dir=str(tmp_path / "run"), batch_size=32, max_steps=610, model="mlp", **settings)
    assert ended.error == ""
    stats = pstats.Stats(str(tmp_path / "calls")).stats  # type: ignore[attr-defined]
    by_function = {where: counts[1] // len(steps) for where, counts in stats.items()}  # without what comes now and then
    calls = sum(by_function.values())
    most = sorted(by_function, key=by_function.__getitem__, reverse=True)
    listed = "\n".join(
        f"{by_function[where]:4} {':'.join(map(str, where))}" for where in most if by_function[where] > 0.9
    )
    assert calls <= CALLS, f"{calls} calls: a change that adds calls to the step names them\n{listed}"
