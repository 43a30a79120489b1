"""A network whose buffers move in evaluations, and grow: the same run on any number of workers."""

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import TensorDataset

import main_multi_gpu
from multigpu_cli.monitor import journal
from tests.commands.several import outputs
from tests.support.run_training import run_training
from tests.support.user_code import tensors

pytestmark = pytest.mark.usefixtures("in_tmp_path")
RUN: dict[str, Any] = {
    "model": "tests.support.awkward_models:drifting", "global_batch_size": 12, "batch_size": 4, "epochs": 2, "lr": 0.05,
    "log_interval": 1, "exact": True,
}  # fmt: skip


def read_run(folder: str, **flags: Any) -> tuple[str, list[float]]:
    """Train; return the fingerprint, and the losses of steps and evaluations."""
    ended = run_training(**RUN | {"save_dir": folder} | flags)
    assert ended.error == ""
    lines = [line for line in journal.read_events(f"{folder}/journal.jsonl") if line["event"] in ("train", "eval")]
    return ended.summary["fingerprint"], [line["loss"] for line in lines]


@pytest.mark.parametrize("flags", [{}, {"ema": 0.9}])
def test_drifting_buffers_are_those_of_one_worker(flags: dict[str, Any]) -> None:
    alone = read_run("1", **flags)
    assert read_run("2", workers=2, **flags) == alone
    assert read_run("3", workers=3, multi_gpu="fsdp", **flags) == alone


def without_evaluations(split: str, seed: int) -> TensorDataset | None:
    return tensors(split, seed) if split == "train" else None


def test_evaluations_leave_training_as_it_was() -> None:
    data = f"{__name__}:{without_evaluations.__name__}"
    (fingerprint, losses), (unevaluated, expected) = read_run("each"), read_run("none", data=data)
    assert (fingerprint, [loss for loss in losses if loss in expected]) == (unevaluated, expected)


def test_predictions_are_those_of_one_worker(tmp_path: Path) -> None:
    read_run("run", batch_size=2)
    assert main_multi_gpu.run(["predict", "run", "--own-code", "--out", "one.csv"]) == 0
    outputs(3, ["predict", "run", "--own-code", "--out", "three.csv"], tmp_path)
    assert Path("three.csv").read_text() == Path("one.csv").read_text()
