"""A model that keeps more than tensors (`get_extra_state`): its whole way through a run and what is done with it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import main_multi_gpu
from multigpu_cli.commands.clean import list_checkpoints
from multigpu_cli.commands.export import export_run
from multigpu_cli.commands.requests import ExportTarget, InferenceRequest
from multigpu_cli.monitor import journal
from tests.support.run_training import run_training

pytestmark = pytest.mark.usefixtures("in_tmp_path")
RUN: dict[str, Any] = {
    "model": "tests.support.awkward_models:telling",
    "global_batch_size": 20,
    "batch_size": 10,
    "save_dir": "run",
}
KEY = "layers._extra_state"


def read_extra_state(file: str) -> Any:
    return torch.load(file, weights_only=True)["model"][KEY]


@pytest.mark.parametrize(("workers", "flags"), [(1, {"ema": 0.9}), (2, {}), (3, {"exact": True})])
def test_it_goes_through_a_run_and_a_resume(workers: int, flags: dict[str, Any]) -> None:
    assert run_training(workers, **RUN | flags, epochs=1).error == ""
    first = read_extra_state("run/last.pt")
    ended = run_training(workers, **RUN | flags, epochs=2)
    assert ended.error == ""
    assert (ended.summary["status"], ended.summary["steps"]) == ("completed", 6)
    last = read_extra_state("run/last.pt")
    assert (last["kept"], last["bytes"], last["last"].tolist()) == (["a", 1.5], b"\xff", [last["passes"]])
    assert last["passes"] > first["passes"] > 0, "a resume goes on where the checkpoint was taken"
    again = run_training(1, **RUN | flags | {"save_dir": "again"}, epochs=1, init_from="run/best.pt")
    assert again.error == ""


def test_what_is_made_of_its_weights_has_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    assert run_training(**RUN, epochs=1).error == ""
    assert {entry.reason for entry in list_checkpoints(Path("run"))} == {""}
    assert main_multi_gpu.run(["evaluate", "run", "--own-code", "--json"]) == 0
    [said] = [line["loss"] for line in journal.read_events("run/journal.jsonl") if line.get("split") == "test"]
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(said)
    request = InferenceRequest(run=Path("run"))
    assert export_run(request, ExportTarget(Path("w.pt"))).checked == "read back: every bit is the same"
    assert torch.load("w.pt", weights_only=True)[KEY]["passes"] == read_extra_state("run/best.pt")["passes"] > 0
    assert export_run(request, ExportTarget(Path("w.safetensors"))).checked.endswith(f"takes more than tensors: {KEY}")
    assert set(safetensors.load_file("w.safetensors")) == {"layers.layer.weight", "layers.layer.bias"}
