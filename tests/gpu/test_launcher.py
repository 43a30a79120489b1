"""launch_multi_gpu.sh on two simulated GPUs: nvidia-smi alone is a stand-in, trainer and workers are real."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from multigpu_cli.monitor import journal
from tests.gpu.simulated.gpus import alone
from tests.gpu.simulated.machine import Machine

LAUNCHER = Path(__file__).resolve().parents[2] / "launch_multi_gpu.sh"
_ROWS = ("where", "batch")  # of the plan
FLAGS = ["--model", "mlp", "--max-steps", "3", "--data-on-device", "off"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "dp"])
def test_a_training_on_two_gpus(mode: str, tmp_path: Path) -> None:
    alone(lambda sim: None)  # compiles the library, once for all processes
    machine = Machine.of(2)
    told = launch_on(machine, tmp_path, "--mode", mode)
    assert told.returncode == 0, told.stderr
    assert "This machine: 2 GPUs to use" in told.stderr
    assert told.stderr.count(machine.gpus[0].name) == 2, "each GPU"
    where, batch = (next(line for line in told.stdout.splitlines() if line.startswith(f" {row} ")) for row in _ROWS)
    assert where.endswith(f"; {machine.gpus[0].name}")
    assert "2 workers" in batch
    (run,) = (tmp_path / "checkpoints" / "digits").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    start = next(event for event in journal.read_events(run / "journal.jsonl") if event["event"] == "start")
    assert (summary["status"], summary["strategy"], summary["devices"]) == ("completed", mode, 2)
    assert (summary["device"], summary["precision"]) == (machine.gpus[0].name, "bf16")
    assert start["gpus"] == [gpu.name for gpu in machine.gpus]
    assert start["devices"] == {"ddp": ["cuda:0"], "dp": ["cuda:0", "cuda:1"]}[mode], "those of rank 0"
    assert len(summary["peak_memory_bytes"]) == {"ddp": 2, "dp": 1}[mode]
    assert all(summary["peak_memory_bytes"])
    assert f"  checkpoints/digits/{run.name}" in told.stderr.splitlines()


def launch_on(machine: Machine, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Let it take every default on that machine."""
    programs = folder / "bin"
    programs.mkdir()
    rows = "\n".join(
        f"{n}, {gpu.name}, {gpu.memory >> 20}, {gpu.memory >> 20}, 0" for n, gpu in enumerate(machine.gpus)
    )
    (programs / "nvidia-smi").write_text(f"#!/bin/sh\ncat <<'END'\n{rows}\nEND\n")
    (programs / "nvidia-smi").chmod(0o755)
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", LAUNCHER, "--yes", *flags, "--", *FLAGS],
        cwd=folder,
        env=machine.environment(os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
