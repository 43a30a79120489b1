"""The examples of data beyond memory: the same run on one worker, and on two that are killed and go on."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.support.die_at_third_checkpoint import die_at_third_checkpoint
from tests.support.run_training import run_training

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("name", [pytest.param("arrow", marks=pytest.mark.slow), "mixture"])
def test_an_example_is_killed_and_goes_on_with_the_same_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / "large_rows.py"), run_name="__main__")
    flags: dict[str, Any] = {"recipe": str(EXAMPLES / f"{name}.yaml"), "data": None, "model": None}
    whole = run_training(1, **flags, save_dir="whole")
    assert not whole.error, whole.error
    assert whole.summary["final"]["val_accuracy"] > 0.6
    killed = run_training(2, **flags, save_dir="killed", prepare=die_at_third_checkpoint)
    assert killed.killed
    ended = run_training(2, **flags, save_dir="killed")
    assert not ended.error, ended.error
    assert ended.summary["resumed_from"]
    assert ended.summary["fingerprint"] == whole.summary["fingerprint"]
    assert ended.summary["final"] == whole.summary["final"]


@pytest.mark.parametrize("name", ["large_rows.py", "arrow.yaml", "mixture.yaml"])
def test_an_example_has_at_most_thirty_lines(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) <= 30
