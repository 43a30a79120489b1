"""A dataset given by the path of its file alone: training, resuming from another path, and inference."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import main_multi_gpu
from multigpu_cli.config.sources import resolve
from tests.distributed.forked import run_forked
from tests.distributed.launcher import alone
from tests.support.run_training import run_training


@pytest.fixture(autouse=True)
def _toys(in_tmp_path: None) -> None:
    lines = ["size,colour,kind", *(f"{at % 7},{'ab'[at % 2]},{'xy'[at % 2]}" for at in range(60))]
    Path("toys.csv").write_text("\n".join(lines))


def test_a_file_trains_resumes_elsewhere_and_predicts(capsys: pytest.CaptureFixture[str]) -> None:
    flags: dict[str, Any] = {"set": "data.target=kind", "batch_size": 6, "save_dir": "run", "max_steps": 4}
    command = alone("--json", data="toys.csv", nproc_per_node=2, multi_gpu="ddp", **flags)
    first = run_forked(command, Path.cwd(), forked_workers=2)
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout)["world_size"] == 2
    assert "mlp on csv (toys.csv is a .csv file: 48 training samples), classification" in first.stderr
    assert resolve({}, [], "run/config.yaml").data.name == "csv"

    Path("moved").mkdir()
    Path("toys.csv").rename("moved/toys.csv")
    again = ["--data-dir", "moved/toys.csv", "--save-dir", "run", "--max-steps", "8"]
    assert main_multi_gpu.run([*again, "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert "resumes from step 4" in plan
    assert "csv (toys.csv is a .csv file: 48" in plan
    for words in (["evaluate", "run"], ["predict", "run", "--out", "predicted.csv"]):
        assert main_multi_gpu.run([*words, "--data-dir", "moved/toys.csv"]) == 0
    assert len(Path("predicted.csv").read_text().splitlines()) == 7, "a header and the test part"


def test_a_resumed_run_keeps_its_dataset_whatever_the_path_looks_like() -> None:
    np.savez("odd.npz", X=np.arange(120.0).reshape(40, 3), y=np.arange(40) % 2)
    Path("odd.npz").rename("odd.data")
    flags: dict[str, Any] = {"model": "mlp", "batch_size": 8, "save_dir": "run", "num_workers": 0}
    begun = run_training(data="npz", data_dir="odd.data", max_steps=4, **flags)
    assert not begun.error
    Path("odd.data").rename("moved.data")
    go_on = ["--data-dir", "moved.data", "--max-steps", "6", "--num-workers", "0", "--dry-run", "--save-dir"]
    assert main_multi_gpu.run([*go_on, "run"]) == 0
    assert main_multi_gpu.run([*go_on, "another"]) == 2, "no dataset is recognized"
    Path("moved.data").rename("toys.csv")
    on = run_training(data=None, data_dir="toys.csv", max_steps=6, **flags)
    assert not on.error, on.error
    assert on.summary["steps"] == 6


def test_a_run_on_a_folder_resumes_with_the_file() -> None:
    """As runs were started before --data-dir could be a file."""
    flags: dict[str, Any] = {
        "model": "mlp",
        "batch_size": 6,
        "save_dir": "run",
        "num_workers": 0,
        "sets": ["data.target=kind"],
    }
    assert not run_training(data="csv", data_dir=".", max_steps=4, **flags).error
    on = run_training(data=None, data_dir="toys.csv", max_steps=6, **flags)
    assert not on.error, on.error
    assert on.summary["steps"] == 6
