"""examples/own_hook.py on one and two workers, killed and resumed: it goes on counting where the checkpoint was."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.die_at_third_checkpoint import die_at_third_checkpoint
from tests.support.run_training import run_training

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_hook.py"
FLAGS: dict[str, Any] = {
    "hook": ["own_hook:GradientNotes"],
    "epochs": 4,
    "batch_size": 10,
    "global_batch_size": 20,
    "exact": True,
}


def test_the_example_has_thirty_lines_at_most() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 30


def test_what_it_notes_is_the_same_on_two_workers_with_a_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(EXAMPLE, tmp_path)
    named = ["hook.args.GradientNotes={file: two.txt}"]
    alone = run_training(**FLAGS, save_dir="alone")
    without = run_training(**FLAGS | {"hook": None}, save_dir="without")
    assert run_training(2, **FLAGS, sets=named, save_dir="two", prepare=die_at_third_checkpoint).killed
    resumed = run_training(2, **FLAGS, sets=named, save_dir="two")
    assert (alone.error, without.error, resumed.error) == ("", "", "")
    notes, again = Path("gradients.txt").read_text().splitlines(), Path("two.txt").read_text().splitlines()
    assert [line.split()[0] for line in notes] == ["1", "2", "3", "4"]
    assert again[-1] == notes[-1]
    assert sorted(set(again)) == notes, "an epoch that is repeated is noted again, the same"
    assert torch.load("two/checkpoints/step_00000012/state.pt", weights_only=True)["hooks"]["GradientNotes"]["count"]
    prints = {ended.summary["fingerprint"] for ended in (alone, without, resumed)}
    assert len(prints) == 1, "and training is what it is without it"
