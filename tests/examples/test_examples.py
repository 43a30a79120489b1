"""The plain script and the one after the smallest change: both run, and they differ in a handful of lines."""

import difflib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLAIN, SEVERAL = ROOT / "examples" / "plain.py", ROOT / "examples" / "several_gpus.py"


def final_loss(command: list[str], folder: Path) -> float:
    """As the plain script prints it, and as the run folder of the other one has it."""
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if PLAIN.name in command[0]:
        (told,) = (line for line in done.stdout.splitlines() if line.startswith("final loss"))
        return float(told.split()[-1])
    return float(json.loads((folder / "runs/digits/summary.json").read_text())["final"]["train_loss"])


def test_no_more_than_five_lines_are_new() -> None:
    old, changed = PLAIN.read_text().splitlines(), SEVERAL.read_text().splitlines()
    new = [line for line in difflib.ndiff(old, changed) if line.startswith("+ ") and line[2:].strip()]
    assert len(new) <= 5, new


def test_the_guide_shows_the_change_as_it_is() -> None:
    shown = re.search(r"^```diff\n(.*?)^```", (ROOT / "docs/start/python.md").read_text(), re.MULTILINE | re.DOTALL)
    assert shown
    old, new = PLAIN.read_text().splitlines(), SEVERAL.read_text().splitlines()
    changes = [line for line in difflib.ndiff(old, new) if line[0] in "+-" and line[2:].strip()]
    found = [line for line in shown[1].splitlines() if line[0] in "+-"]
    assert sorted(found) == sorted(line[0] + line[2:] for line in changes)


@pytest.mark.slow
def test_plain_one_worker_two_workers_and_again(tmp_path: Path) -> None:
    losses = [final_loss([str(PLAIN)], tmp_path)]
    for folder, launcher in (("one", []), ("two", ["-m", "torch.distributed.run", "--nproc_per_node=2"])):
        (tmp_path / folder).mkdir()
        losses.append(final_loss([*launcher, str(SEVERAL)], tmp_path / folder))
    assert losses[0] == pytest.approx(losses[1], rel=0.15)  # the plain loop shuffles by torch's generator
    assert losses[1] == pytest.approx(losses[2], abs=2e-3)
    assert final_loss([str(SEVERAL)], tmp_path / "two") == losses[2], "a complete run is told of, not repeated"
