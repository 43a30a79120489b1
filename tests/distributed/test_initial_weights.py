"""A run that starts from somebody's weights: what is told of them, alike on every rank, once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from multigpu_cli.commands.export import export_run
from multigpu_cli.commands.requests import ExportTarget, InferenceRequest
from multigpu_cli.monitor import journal
from tests.support.run_training import run_training

RUN: dict[str, Any] = {"global_batch_size": 20, "batch_size": 5, "epochs": 1, "log_interval": 1}
HEAD = ["6.weight", "6.bias"]  # the last layer of tests.support.user_code:net


def five_classes(split: str, seed: int) -> TensorDataset:
    return TensorDataset(torch.randn(20, 6), torch.arange(20) % 5)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def events(kind: str, folder: str) -> list[dict[str, Any]]:
    return [event for event in journal.read_events(f"{folder}/journal.jsonl") if event["event"] == kind]


@pytest.mark.parametrize("flags", [{}, {"ema": 0.9}, {"exact": True}], ids=str)
def test_an_export_with_another_head_starts_a_run_on_any_number_of_workers(flags: dict[str, Any]) -> None:
    """As a user does it: train, export, and begin another task from the export."""
    pytest.importorskip("safetensors")
    assert run_training(**RUN, data=f"{__name__}:five_classes", save_dir="before").error == ""
    export_run(InferenceRequest(run=Path("before")), ExportTarget(Path("weights.safetensors")))
    start = RUN | flags | {"init_from": "weights.safetensors", "lr": 1e-9}
    refused = run_training(2, **start, save_dir="refused")
    assert (refused.kind, Path("refused").exists()) == ("RequestError", False)
    assert "6.weight is (5, 16), the model has (3, 16)" in refused.error
    assert "--init-partial" in refused.error
    ends = [run_training(count, **start, save_dir=f"on{count}", init_partial=True) for count in (1, 2)]
    assert [end.error for end in ends] == ["", ""]
    before, *after = (torch.load(f"{run}/last.pt", weights_only=True)["model"] for run in ("before", "on1", "on2"))
    for state in after:
        assert torch.allclose(state["2.weight"], before["2.weight"], atol=1e-6)
        assert torch.allclose(state["6.weight"], after[0]["6.weight"], atol=1e-6)
    for run in ("on1", "on2"):
        [told] = events("initial_weights", run)
        assert (told["file"], list(told["initialised"]), told["unused"]) == ("weights.safetensors", HEAD, [])
        assert told["loaded"]["2.weight"] == "2.weight"
    assert [event["loss"] for event in events("train", "on2")] == pytest.approx(
        [event["loss"] for event in events("train", "on1")], rel=1e-4
    )


def test_one_rank_reads_the_file(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_training(**RUN, save_dir="before").error == ""
    for node in ("node0", "node1"):
        Path(node).mkdir()
    Path("before/best.pt").rename("node0/weights.pt")
    ended = run_training(2, **RUN, apart=True, init_from="weights.pt", save_dir="run", screen="normal")
    assert ended.error == ""
    assert len(events("initial_weights", "node0/run")) == 1
    shown = capfd.readouterr().out
    assert shown.count("Weights from weights.pt\n loaded          8 tensors: 2.weight") == 1
    assert shown.index("Weights from") < shown.index("step 1")


def test_a_resume_takes_the_checkpoint_and_not_the_weights() -> None:
    assert run_training(**RUN, save_dir="before").error == ""
    flags = RUN | {"init_from": "before", "save_dir": "run"}
    assert run_training(**flags).error == ""
    ended = run_training(**flags | {"epochs": 2})
    assert (ended.error, ended.summary["steps"]) == ("", 6)
    assert len(events("initial_weights", "run")) == 1


def test_convolutions_that_lie_channels_last_start_alike_on_every_rank() -> None:
    pictures: dict[str, Any] = {"data": "digits", "model": "convnet", "sets": ["model.args.width=4"]}
    pictures |= {"global_batch_size": 16, "batch_size": 8, "max_steps": 2, "log_interval": 1}
    assert run_training(**pictures, save_dir="before", seed=7).error == ""
    ends = [run_training(count, **pictures, init_from="before/last.pt", save_dir=f"on{count}") for count in (1, 2)]
    assert [end.error for end in ends] == ["", ""]
    assert [event["loss"] for event in events("train", "on2")] == pytest.approx(
        [event["loss"] for event in events("train", "on1")], rel=1e-4
    )
