"""examples/own_simclr.py on Fashion-MNIST: a linear probe reads more from its features than from random ones."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.run_training import run_training

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_simclr.py"
REAL = Path(os.environ.get("MULTIGPU_TEST_DATA", Path(__file__).parents[3] / "shared" / "data")) / "fashion-mnist"
FLAGS: dict[str, Any] = {"data": "fashion-mnist", "data_dir": str(REAL), "sets": ["data.args.val_fraction=0.02"]}
LEARN: dict[str, Any] = {
    "model": "own_simclr:Encoder",
    "task": "own_simclr:SimCLR",
    "global_batch_size": 512,
    "batch_size": 128,
    "max_steps": 100,
    "save_dir": "simclr",
}
PROBE: dict[str, Any] = {"model": "own_simclr:Probe", "freeze": ["features.*"], "batch_size": 250, "max_steps": 200}


@pytest.mark.slow
@pytest.mark.skipif(
    not REAL.is_dir(), reason=f"Fashion-MNIST is not in {REAL} (MULTIGPU_TEST_DATA names the folder above)"
)
def test_features_beat_random_ones_in_a_linear_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(EXAMPLE, tmp_path)
    learned = run_training(2, **FLAGS | LEARN)
    assert learned.error == ""
    probe = FLAGS | PROBE
    trained = run_training(**probe, save_dir="probe", init_from="simclr/last.pt", init_partial=True)
    random = run_training(**probe, save_dir="random")
    assert not trained.error + random.error
    assert trained.summary["final"]["test_accuracy"] > random.summary["final"]["test_accuracy"] + 0.03
