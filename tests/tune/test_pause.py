"""tune.pause_at in this process: a run that pauses at rungs is the run that does not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from multigpu_cli import engine
from multigpu_cli.config.resume_rules import replace_settings
from multigpu_cli.config.sources import resolve
from multigpu_cli.config.yaml_text import dump_config
from multigpu_cli.monitor.history import load_history
from multigpu_cli.monitor.journal import read_json
from multigpu_cli.run.finalize import finish_run
from multigpu_cli.run.run import Run
from multigpu_cli.tune.trials import read_rung
from tests.tune.studies import make_study
from train_multi_gpu import train

SETTINGS = {"model": "mlp", "epochs": 3, "batch_size": 128, "exact": True, "multi_gpu": "none"}


def run(folder: Path, *sets: str) -> dict[str, Any]:
    return train(resolve({**SETTINGS, "save_dir": str(folder)}, ["model.args.width=8", *sets], None), screen="quiet")


def test_a_run_that_pauses_at_rungs_equals_one_that_does_not_and_never_sees_the_test_split(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    first = run(tmp_path / "paused", "tune.pause_at=1")
    assert (first["status"], first["epochs"]) == ("stopped", 1)
    second = run(tmp_path / "paused", "tune.pause_at=2")
    assert (second["status"], second["epochs"]) == ("stopped", 2)
    again = run(tmp_path / "paused", "tune.pause_at=2")  # killed between its checkpoint and its end: one more step
    assert again["status"] == "stopped"
    assert again["steps"] - second["steps"] <= 1
    last = run(tmp_path / "paused", "tune.pause_at=3")
    assert last["status"] == "completed"
    assert last["fingerprint"] == whole["fingerprint"]
    assert last["final"]["val_loss"] == whole["final"]["val_loss"]
    assert whole["final"]["test_loss"] is not None
    assert last["final"]["test_loss"] is None
    assert {split for _, split in load_history(tmp_path / "paused").evals} == {"val"}


@pytest.mark.parametrize("best", ["val_loss:min", "val_accuracy:max"])
def test_value_at_a_rung_is_that_of_best_pt(best: str, tmp_path: Path) -> None:
    """The loss rises again after its best epoch."""
    study, epochs = make_study(objectives=["val_loss:min"], best=best), []
    for rung in (2, 4, 6):
        run(tmp_path, f"tune.pause_at={rung}", f"best={best}", "lr=0.2", "epochs=6")
        content = torch.load(tmp_path / "best.pt", weights_only=True)["metrics"]
        assert read_rung(tmp_path, study, rung).values == [content["val_loss"]]
        epochs.append(content["epoch"])
    losses = [event["loss"] for (_, split), event in sorted(load_history(tmp_path).evals.items()) if split == "val"]
    assert epochs[-1] < 6
    summary = read_json(tmp_path / "summary.json", "summary.json")
    (tmp_path / "summary.json").write_text(json.dumps(summary | {"best": {}}))  # --best is always NaN
    assert read_rung(tmp_path, study, 6).values == [summary["final"]["val_loss"]]
    assert best != "val_loss:min" or losses[epochs[-1] - 1] == min(losses)


def test_the_pause_is_the_commands_own_and_stays_out_of_config_yaml() -> None:
    config = resolve({}, ["tune.pause_at=2"], None)
    assert config.length.pause_at == 2
    assert "pause_at" not in dump_config(config)
    with pytest.raises(Exception, match=r"tune\.pause_at"):
        replace_settings(config, {"tune.pause_at": 0})


def test_completed_trial_carries_no_stop_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise parts that wait at the end of a completed run, such as the mirror, would take it for a stopped one."""
    signals: list[str | None] = []

    def finish(run: Run, status: str) -> dict[str, Any]:
        signals.append(run.control.stop.signal)
        return finish_run(run, status)

    monkeypatch.setattr(engine, "finish_run", finish)
    run(tmp_path, "tune.pause_at=1")
    run(tmp_path, "tune.pause_at=3")
    assert signals == ["tune.pause_at 1", None]
