"""A checkpoint holds the live weights, whichever GPU they are on and whatever the device does beside the copy."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from multigpu_cli import engine
from multigpu_cli.checkpoint.pieces import serialize
from multigpu_cli.checkpoint.snapshot import Progress, TrainState, Writer
from multigpu_cli.checkpoint.weights import copy_to_host, fingerprint, read_weights
from multigpu_cli.config.schema import OptimizerConfig
from multigpu_cli.optimizers.build import build_optimizer, set_rate
from multigpu_cli.optimizers.eval_weights import EMAModel
from multigpu_cli.run.checkpointing import save_checkpoint
from multigpu_cli.runtime.precision import Precision
from tests.gpu.simulated.gpus import alone, train_on_gpus
from tests.gpu.simulated.install import Simulated


def build_state(device: torch.device, optimizer: str, precision: str) -> TrainState:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(device)
    built = build_optimizer(model, OptimizerConfig(name=optimizer))
    return TrainState(model, built, Precision(precision, device), EMAModel(model, 0.9), Progress())


def train(live: TrainState) -> None:
    live.precision.backward(live.model(torch.randn(8, 3, device=live.precision.device)).square().mean())
    set_rate(live.optimizer, 0.05)
    _, skipped = live.precision.clip_and_step(live.optimizer, list(live.model.parameters()), 1.0)
    assert live.average is not None
    live.average.update_parameters(live.model, skipped)


def captures(sim: Simulated, live: TrainState) -> None:
    """Three checkpoints, each by the writer's thread while the next forward pass is under way; checks them."""
    captured: dict[str, Any] | None = None
    for _ in range(3):
        train(live)
        model, averages = (each.state_dict() for each in (live.model, live.average) if each is not None)
        before = serialize(copy_to_host([model, live.optimizer.state_dict(), averages]))
        with sim.record.watching() as events, Writer() as writer:
            snapshot = live.begin_capture(captured)
            writer.submit(snapshot.finish, lambda: None)
            live.model(torch.randn(8, 3, device=live.precision.device))  # BatchNorm's buffers move
            writer.wait_for_staging()
            assert writer.wait() is None
        captured = snapshot.state
        assert serialize([captured[name] for name in ("model", "optimizer", "average")]) == before
        beside = [event for event in events if event.thread.startswith("checkpoint")]
        copied = {(event.device, event.stream) for event in beside if event.kind == "copy"}
        waited = {(event.device, event.stream) for event in beside if event.what == "Stream.synchronize"}
        assert copied == waited
        assert {device for device, _ in copied} == {live.precision.device.index}
        assert 0 not in {stream for _, stream in copied}, "beside what the device computes, not after it"


@pytest.mark.parametrize("number", [0, 1])
def test_every_copy_is_on_the_stream_that_is_waited_for(number: int) -> None:
    def work(sim: Simulated) -> None:
        torch.cuda.set_device(number)
        for optimizer, precision in (("adamw", "off"), ("sgd", "bf16"), ("adamw", "fp16")):
            captures(sim, build_state(torch.device("cuda", number), optimizer, precision))

    alone(work)


@pytest.mark.parametrize("number", [0, 1])
def test_the_files_hold_the_live_weights(number: int, tmp_path: Path) -> None:
    def look(sim: Simulated) -> None:
        def noted(run: Any) -> None:
            live[f"step_{run.progress.step}"] = fingerprint(run.state.model.state_dict())
            (tmp_path / "live.json").write_text(json.dumps(live))
            save_checkpoint(run)

        live: dict[str, str] = {}
        patch.object(engine, "save_checkpoint", noted).start()

    flags: dict[str, Any] = {"gpu_ids": str(number), "multi_gpu": "none", "checkpoint_every": "2", "keep": "9"}
    ended = train_on_gpus(prepare=look, save_dir=str(tmp_path / "run"), max_steps=4, ema="0.9", **flags)
    assert not ended.error
    live = json.loads((tmp_path / "live.json").read_text())
    written = {file.parent.name: fingerprint(read_weights(file)) for file in tmp_path.glob("run/**/step_*/state.pt")}
    assert len(written) >= 2
    assert {name: live[f"step_{int(name.removeprefix('step_'))}"] for name in written} == written
