"""Whole runs of PPO on made-up prices."""

import json
from pathlib import Path
from typing import Any

from tests.support.run_training import run_training

SMALL = ["made_days=160", "symbols=2", "period=5", "turbulence_window=20", "length=24", "window=3"]
SETS = [*(f"data.args.{each}" for each in SMALL), "task.args.rollout=16", "task.args.evaluate_episodes=1"]
TRADING: dict[str, Any] = {
    "data": "trading", "task": "ppo", "model": "clstm-actor-critic", "num_envs": 4, "env_group": 2,
}  # fmt: skip
STEADY: dict[str, Any] = {"lr": 1e-2, "schedule": "constant", "warmup_epochs": 0, "exact": True}
FEW = ["model.args.features=4", "model.args.hidden=4", "task.args.minibatches=1", "task.args.evaluate_every=1"]


def test_another_number_of_workers_and_a_resume_within_episodes_change_nothing(tmp_path: Path) -> None:
    import multigpu_cli.monitor.plot_style  # noqa: F401 - once rather than in each forked rank

    whole = run_training(1, sets=SETS + FEW, save_dir=str(tmp_path / "whole"), env_steps=128, **TRADING, **STEADY)
    begun = run_training(2, sets=SETS + FEW, save_dir=str(tmp_path / "run"), env_steps=64, **TRADING, **STEADY)
    assert_the_equity_curve_is_there(tmp_path / "run")  # the second worker has played it
    again = run_training(1, sets=SETS + FEW, save_dir=str(tmp_path / "run"), env_steps=128, **TRADING, **STEADY)
    assert [whole.error, begun.error, again.error] == [""] * 3
    assert again.summary["resumed_from"]
    assert not again.summary["faults"], "no episode had to begin anew"
    assert again.summary["fingerprint"] == whole.summary["fingerprint"] != begun.summary["fingerprint"]
    curves = [assert_the_equity_curve_is_there(tmp_path / name) for name in ("run", "whole")]
    assert curves[0] == curves[1]
    assert len(set(curves[0]["values"]["policy"])) > 1, "it trades"


def assert_the_equity_curve_is_there(folder: Path) -> Any:
    summary = json.loads((folder / "summary.json").read_text())
    curve, final = summary["equity_curve"], summary["final"]
    assert list(curve["values"]) == ["policy", "buy_and_hold", "equal_weight"]
    assert {len(values) for values in curve["values"].values()} == {len(curve["dates"])}
    assert "synthetic" in curve["prices"]
    for prefix, values in zip(("", "buy_and_hold_", "equal_weight_"), curve["values"].values(), strict=True):
        assert abs(final[f"test_{prefix}cumulative_return"] - (values[-1] / values[0] - 1)) < 1e-9
    assert (folder / "equity_curve.png").read_bytes().startswith(b"\x89PNG")
    start = json.loads((folder / "journal.jsonl").read_text().splitlines()[0])
    assert "synthetic" in start["plan"]["contents"]
    return curve
