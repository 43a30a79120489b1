import json
from pathlib import Path

from tests.trained import trained

TRADING = {"data": "trading", "task": "ppo", "model": "actor-critic", "num_envs": 4, "env_group": 2, "lr": 3e-4}
SMALL = ["made_days=160", "symbols=2", "period=5", "turbulence_window=20", "length=16", "window=3"]


def test_a_run_on_trading_leaves_its_equity_curve_whichever_worker_played_it(tmp_path: Path) -> None:
    sets = [f"data.args.{each}" for each in SMALL] + ["task.args.rollout=16", "task.args.evaluate_episodes=1"]
    ended = trained(2, sets=sets, save_dir=str(tmp_path / "run"), env_steps=128, **TRADING)
    assert not ended.error
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    curve, final = summary["equity_curve"], summary["final"]
    assert set(curve["values"]) == {"policy", "buy_and_hold", "equal_weight"}
    assert {len(values) for values in curve["values"].values()} == {len(curve["dates"])}
    assert "synthetic" in curve["prices"]
    for name, prefix in (("policy", ""), ("buy_and_hold", "buy_and_hold_"), ("equal_weight", "equal_weight_")):
        values = curve["values"][name]
        assert abs(final[f"test_{prefix}cumulative_return"] - (values[-1] / values[0] - 1)) < 1e-9
    assert (tmp_path / "run" / "equity_curve.png").read_bytes().startswith(b"\x89PNG")
    start = json.loads((tmp_path / "run" / "journal.jsonl").read_text().splitlines()[0])
    assert "synthetic" in start["plan"]["contents"]
