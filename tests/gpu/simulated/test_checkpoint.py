"""A checkpoint holds the live weights, whichever GPU they are on and whatever the device does beside the copy."""

import json
import logging
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
from multigpu_cli.run.run import LossMeter
from multigpu_cli.runtime.precision import Precision
from tests.gpu.simulated.gpus import alone, events_in, train_on_gpus
from tests.gpu.simulated.install import Simulated
from tests.gpu.simulated.machine import Machine


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


def test_all_checkpoints_are_copied_on_one_stream_and_all_batches_on_another(tmp_path: Path) -> None:
    """torch deals out 32 in turn: with new ones each time, a checkpoint's would one day be that of the batches."""
    record = tmp_path / "events"
    flags: dict[str, Any] = {
        "checkpoint_every": "2",
        "data_on_device": "off",
        "num_workers": 0,
        "epochs": 2,
        "multi_gpu": "none",
    }
    ended = train_on_gpus(machine=Machine(record=str(record)), save_dir=str(tmp_path / "run"), **flags)
    assert not ended.error, ended.error
    copies = [event for _, event in events_in(record) if event.kind == "copy" and event.stream]
    checkpoints = {event.stream for event in copies if event.thread.startswith("checkpoint")}
    batches = {event.stream for event in copies if "collate.py" in event.place}
    assert (len(checkpoints), len(batches), len(checkpoints & batches)) == (1, 1, 0), (checkpoints, batches)


def test_a_run_without_page_locked_memory_goes_on_and_says_so(tmp_path: Path) -> None:
    """WSL2 and containers limit it."""

    def refuse(sim: Simulated) -> None:
        def empty_like(*given: Any, **named: Any) -> Any:
            return no_memory() if named.get("pin_memory") else real(*given, **named)

        def to(self: torch.Tensor, *given: Any, **named: Any) -> Any:  # which allocates it by itself
            pins = self.is_cuda and named.get("non_blocking") and "cpu" in map(str, given)
            return no_memory() if pins else moved(self, *given, **named)

        def add(self: LossMeter, *given: Any) -> None:
            added(self, *given)
            self.peek()  # as the progress bar does

        def no_memory(*_: Any) -> Any:
            raise RuntimeError("CUDA error: out of memory\nCompile with …")

        logging.getLogger("multigpu_cli").addHandler(logging.FileHandler(tmp_path / "said"))
        real, moved, added = torch.empty_like, torch.Tensor.to, LossMeter.add
        patch.object(torch.Tensor, "to", to).start()
        patch.object(LossMeter, "add", add).start()
        patch.object(torch, "empty_like", empty_like).start()
        patch.object(torch.Tensor, "pin_memory", no_memory).start()

    flags: dict[str, Any] = {"checkpoint_every": "2", "data_on_device": "off", "max_steps": 4, "multi_gpu": "none"}
    ended = train_on_gpus(prepare=refuse, save_dir=str(tmp_path / "poor"), **flags)
    assert not ended.error, ended.error
    said = (tmp_path / "said").read_text()
    assert said == "no page-locked memory (CUDA error: out of memory): copies between host and GPU are slower\n"
    rich = train_on_gpus(save_dir=str(tmp_path / "rich"), **flags)
    assert rich.summary["fingerprint"] == ended.summary["fingerprint"]
