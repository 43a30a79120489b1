"""What checkpoints hold, and how a run goes on from them."""

import signal
import subprocess
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from multigpu_cli import engine
from multigpu_cli.checkpoint.manifest import read_manifest
from multigpu_cli.checkpoint.pieces import iterate_tensors
from multigpu_cli.checkpoint.store import Checkpoint
from multigpu_cli.distributed.placement import Placement
from multigpu_cli.monitor import journal
from multigpu_cli.run.checkpointing import save_checkpoint
from tests.gpu.front_door import ALONE, command, figures, run, same_weights
from tests.gpu.in_process import train
from tests.gpu.machine import ROOT, is_simulated, patience

_EVERY = 7
_PATIENCE = patience(90)  # seconds until a run that is to be ended has written a checkpoint


def bytes_on_disk(folder: Path) -> dict[str, Any]:
    """Every checkpoint holds the very weights and averages that were live when it was taken, on every GPU."""
    compared = 0
    width = "512" if is_simulated() else "2048"  # tens of megabytes: a copy that is not waited for is not there yet
    for number in range(torch.cuda.device_count()):
        device = torch.device("cuda", number)
        live: dict[int, list[Tensor]] = {}

        def save(run: Any, live: dict[int, list[Tensor]] = live) -> None:
            torch.cuda.synchronize()
            parts = [run.state.model.state_dict(), run.state.average.state_dict(), run.state.optimizer.state_dict()]
            live[run.progress.step] = [tensor.detach().cpu().clone() for tensor in iterate_tensors(parts)]
            save_checkpoint(run)

        with patch.object(engine, "save_checkpoint", save):
            flags = {"model": "mlp", "max_steps": "70", "checkpoint_every": str(_EVERY), "keep": "100", "ema": "0.9"}
            sets = (f"model.args.width={width}", "model.args.depth=4")
            train(folder / str(number), Placement("single", (device,), 0, "one GPU"), sets, **flags)
        for step, tensors in live.items():
            _same_bytes(folder / str(number) / "checkpoints" / f"step_{step:08d}", tensors)
        assert len(live) >= 70 // _EVERY, f"checkpoints of steps {list(live)}"
        compared += len(live)
    return {"checkpoints_compared": compared, "tensors_each": len(tensors)}


def _same_bytes(folder: Path, live: list[Tensor]) -> None:
    state = Checkpoint(folder, read_manifest(folder)).state()
    stored = list(iterate_tensors([state["model"], state["average"], state["optimizer"]]))
    assert len(stored) == len(live), f"{folder.name}: {len(stored)} tensors, {len(live)} are live"
    wrong = [
        index
        for index, (one, other) in enumerate(zip(stored, live, strict=True))
        if one.numpy().tobytes() != other.numpy().tobytes()
    ]
    assert not wrong, f"{folder.name}: {len(wrong)} of {len(live)} tensors are not the live ones, first {wrong[0]}"


def killed_and_resumed(folder: Path) -> dict[str, Any]:
    """With --exact a run that SIGKILL has ended goes on to the weights of one that nothing has disturbed."""
    return _interrupt_and_resume(folder, signal.SIGKILL, -signal.SIGKILL)


def stopped_and_resumed(folder: Path) -> dict[str, Any]:
    """SIGTERM: a checkpoint, exit code 75, and the same end."""
    return _interrupt_and_resume(folder, signal.SIGTERM, 75)


def _interrupt_and_resume(folder: Path, number: signal.Signals, code: int) -> dict[str, Any]:
    flags: tuple[str, ...] = (*ALONE, "--exact", "--epochs", "8", "--checkpoint-every", "20", "--log-interval", "1")
    flags += ("--model", "tests.gpu.networks:at_pass")
    whole = run(folder / "whole", *flags)
    parts = folder / "parts"
    with subprocess.Popen(command(parts, *flags), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as first:
        try:
            _wait_for_checkpoint(parts / "journal.jsonl")
            first.send_signal(number)
            printed = first.communicate(timeout=_PATIENCE)[0].decode()
        finally:
            first.kill()
    assert first.returncode == code, f"exit code {first.returncode} instead of {code}: {printed[-1000:]}"
    resumed = run(parts, *flags)
    assert resumed.of("resume"), "it began afresh"
    same_weights(whole, resumed)
    return figures(resumed) | {"resumed_at": resumed.of("resume")[-1]["step"]}


def _wait_for_checkpoint(lines: Path) -> None:
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        if lines.exists() and any(event["event"] == "checkpoint" for event in journal.read_events(lines)):
            return
        time.sleep(0.05)
    raise AssertionError(f"no checkpoint after {_PATIENCE:.0f} s")
