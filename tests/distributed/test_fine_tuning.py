"""Rates by pattern and by depth, and parameters that learn later, as a user asks for them, on any number of workers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from multigpu_cli.monitor import journal
from tests.support.run_training import run_training

RUN: dict[str, Any] = {"save_dir": "run", "global_batch_size": 20, "batch_size": 5, "epochs": 4, "log_interval": 1}
RATES = ["optimizer.rates={6.*: 10, '*.bias': 0.5}", "optimizer.layer_decay=0.8"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def curve(folder: str, key: str = "loss") -> dict[int, float]:
    """The figure of each step; after a resume the last line of a step counts."""
    events = journal.read_events(f"{folder}/journal.jsonl")
    return {event["step"]: event[key] for event in events if event["event"] == "train"}


def test_rates_are_shown_take_effect_and_are_alike_on_two_workers(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_training(**RUN, lr=0.01, screen="normal", sets=RATES).error == ""
    shown = capfd.readouterr().out
    assert "\nLearning rates\n 0.1 (× 10)       1 tensor, 48 parameters: 6.weight\n" in shown
    assert "\n 0.0064 (× 0.64)  1 tensor, 96 parameters: 2.weight\n" in shown
    assert max(curve("run", "lr").values()) == pytest.approx(0.01), "the journal shows the schedule's rate"
    assert run_training(2, **RUN | {"save_dir": "two"}, lr=0.01, sets=RATES).error == ""
    assert curve("two") == pytest.approx(curve("run"), rel=1e-4)
    assert run_training(**RUN | {"save_dir": "plain"}, lr=0.01).error == ""
    assert curve("plain")[2] != pytest.approx(curve("run")[2], rel=1e-3)


def test_rates_stay_as_the_run_was_started_with() -> None:
    assert run_training(**RUN | {"epochs": 1}, sets=RATES).error == ""
    ended = run_training(**RUN, sets=["optimizer.rates={6.*: 3}"])
    assert "optimizer.rates 6.*=3 differs from 6.*=10 *.bias=0.5, with which" in ended.error
    assert run_training(**RUN).error == ""
    state = torch.load("run/checkpoints/step_00000012/state.pt", weights_only=True)["optimizer"]
    factors = sorted({group["rate_factor"] for group in state["param_groups"]})
    assert factors == pytest.approx([0.4, 0.64, 0.8, 5, 10])
