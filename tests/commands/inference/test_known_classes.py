"""The number of classes that a run counted is kept with its weights and checkpoints: no later command counts again."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import main_multi_gpu
from multigpu_cli.data import load
from tests.support.run_training import run_training

HERE = "tests.commands.inference.test_known_classes"
FLAGS: dict[str, Any] = {"data": f"{HERE}:Uncounted", "lr": 0.01, "batch_size": 5}


class Uncounted(Dataset[tuple[Tensor, Any]]):
    """Three classes, which only its samples tell; numbers as floats, with `numbers`."""

    def __init__(self, split: str, size: int = 40, highest: int = 2, numbers: bool = False) -> None:
        self.size = size if split == "train" else 12
        self.highest, self.numbers = (2 if split == "train" else highest), numbers

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        label = self.highest if index == 7 else index % 3
        return torch.full((6,), float(index)), float(label) if self.numbers else label


class OneNumber(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 1)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    assert run_training(save_dir="run", epochs=2, **FLAGS).error == ""

    def count_again(*_: object) -> None:
        raise ValueError("counted again")

    monkeypatch.setattr(load, "_report_reading", count_again)
    return Path("run")


def test_commands_take_the_classes_that_their_run_counted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    final = json.loads((run / "summary.json").read_text())["final"]
    capsys.readouterr()
    assert main_multi_gpu.run(["evaluate", "run", "--own-code", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == final["test_loss"]
    assert main_multi_gpu.run(["predict", "run", "--own-code", "--out", "table.csv"]) == 0
    assert main_multi_gpu.run(["export", "run", "--own-code", "--to", "weights.pt"]) == 0
    longer = run_training(save_dir="run", epochs=3, resume="run", **FLAGS)
    assert (longer.error, longer.summary["epochs"]) == ("", 3)


def test_classes_are_counted_again_for_other_data(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate = ["evaluate", "run", "--own-code"]
    assert main_multi_gpu.run([*evaluate, "--data", f"{HERE}:Uncounted"]) == 0
    assert main_multi_gpu.run([*evaluate, "--set", "data.args.size=40"]) == 1
    assert main_multi_gpu.run(["evaluate", "run", "--own-code", "--set", "data.args.size=30"]) == 1
    assert capsys.readouterr().err.count("counted again") == 4


def test_a_label_beyond_the_classes_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = json.loads((run / "checkpoints/step_00000016/manifest.json").read_text())["settings"]
    assert settings["built_for"]["num_classes"] == 3
    Uncounted.__init__.__defaults__ = (40, 5, False)  # the same data, with other labels since
    try:
        assert main_multi_gpu.run(["evaluate", "run", "--own-code"]) == 2
        ended = run_training(save_dir="run", epochs=3, resume="run", **FLAGS)
    finally:
        Uncounted.__init__.__defaults__ = (40, 2, False)
    problem = "sample 7 has the label 5, and there are 3 classes"
    assert problem in capsys.readouterr().err
    assert ended.kind == "RequestError", ended.error


def test_numbers_may_be_larger_than_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    more: dict[str, Any] = {
        "task": "regression",
        "model": f"{HERE}:OneNumber",
        "sets": ["data.args.numbers=true", "data.args.highest=9"],
    }
    assert run_training(save_dir="run", epochs=1, **FLAGS, **more).error == ""
    assert main_multi_gpu.run(["evaluate", "run", "--own-code"]) == 0
