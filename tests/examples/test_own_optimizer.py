"""examples/own_optimizer.py as the guide names it: on one and two workers, killed, and resumed on the other number."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.run_training import run_training

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_optimizer.py"
RUN: dict[str, Any] = {
    "optimizer": "own_optimizer:Lion",
    "lr": 3e-3,
    "schedule": "own_optimizer:triangle",
    "exact": True,
    "batch_size": 5,
    "global_batch_size": 20,
    "epochs": 4,
    "checkpoint_every": 2,
}


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 30


def test_it_has_the_same_bits_on_one_and_two_workers_through_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    monkeypatch.chdir(tmp_path)
    whole = run_training(1, save_dir="whole", **RUN)
    assert whole.error == ""
    assert whole.summary["steps"] == 12
    deed = {"OWN_DEED": "1:12:SIGKILL", "OWN_AFTER": "cut/checkpoints/step_*"}
    ended = run_training(2, save_dir="cut", environ=deed, **RUN)
    assert ended.killed
    resumed = run_training(1, save_dir="cut", **RUN)
    assert resumed.error == ""
    assert "step_" in resumed.summary["resumed_from"]
    assert resumed.summary["fingerprint"] == whole.summary["fingerprint"]
