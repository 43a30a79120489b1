"""Networks of timm, the real package, as a user asks for them."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import main_multi_gpu
from multigpu_cli.config.schema import ModelConfig
from multigpu_cli.models.build import build_model
from tests.support.run_training import run_training

VIT = {"depth": 1, "embed_dim": 16, "num_heads": 2, "patch_size": 4}
DIGITS: dict[str, Any] = {
    "data": "digits",
    "model": "timm/vit_tiny_patch16_224",
    "num_workers": 0,
    "global_batch_size": 64,
}


def build(name: str, input_shape: tuple[int, ...] = (3, 8, 8), **args: Any) -> torch.nn.Module:
    offered = {"input_shape": input_shape, "num_classes": 7, "task": "classification", "mode": "flatten", "seed": 1}
    return build_model(ModelConfig(args=args), name, offered)


@pytest.mark.parametrize("name", ["timm/resnet10t", "timm.models.resnet:resnet10t"])
def test_it_has_the_classes_and_the_channels_of_the_data(name: str) -> None:
    assert build(name)(torch.rand(2, 3, 32, 32)).shape == (2, 7)
    assert build(name, (2, 8, 8))(torch.rand(2, 2, 32, 32)).shape == (2, 7)


def test_a_network_made_for_one_size_is_built_for_that_of_the_data() -> None:
    assert build("timm/vit_tiny_patch16_224", (1, 8, 8), **VIT)(torch.rand(2, 1, 8, 8)).shape == (2, 7)
    larger = build("timm/vit_tiny_patch16_224", (1, 8, 8), **VIT, img_size=12)
    assert larger(torch.rand(2, 1, 12, 12)).shape == (2, 7)


def test_create_model_of_timm_is_a_factory_too() -> None:
    model = build("timm:create_model", (1, 32, 32), model_name="resnet10t")
    assert isinstance(model, timm.models.ResNet)
    assert model(torch.rand(2, 1, 32, 32)).shape == (2, 7)


def test_a_vit_trains_resumes_evaluates_predicts_and_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same bits on two workers, and from a checkpoint on one; --own-code is not needed."""
    monkeypatch.chdir(tmp_path)
    sets = [f"model.{name}={value}" for name, value in VIT.items()]
    flags = {**DIGITS, "exact": True, "batch_size": 32, "epochs": 2, "base_lr": 1e-2}
    whole = run_training(2, **flags, sets=sets, save_dir="whole")
    assert not whole.error, whole.error
    earlier = min(Path("whole/checkpoints").iterdir())
    resumed = run_training(**flags, sets=sets, save_dir="run", resume=str(earlier))
    assert resumed.summary["resumed_from"] == str(earlier)
    assert resumed.summary["fingerprint"] == whole.summary["fingerprint"]
    assert resumed.summary["final"]["test_accuracy"] > 0.2, "guessing gets 0.1"

    assert main_multi_gpu.run(["evaluate", "run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["accuracy"] == resumed.summary["final"]["test_accuracy"]
    assert main_multi_gpu.run(["predict", "run", "--out", "rows.csv"]) == 0
    with open("rows.csv", newline="") as table:
        rows = list(csv.DictReader(table))
    assert sum(row["target"] == row["prediction"] for row in rows) / len(rows) == found["accuracy"]
    assert main_multi_gpu.run(["export", "run", "--to", "vit.onnx"]) == 0
    assert Path("vit.onnx").exists()
