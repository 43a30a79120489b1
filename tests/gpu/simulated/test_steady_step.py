"""Once a run is under way, the host queues work for the GPU and waits for nothing in a step."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from multigpu_cli import engine
from multigpu_cli.data.loader import Batch
from multigpu_cli.planning.batch import StepLayout
from multigpu_cli.run.assembly.components import StepResult
from multigpu_cli.run.run import Run
from tests.gpu.simulated.gpus import train_on_gpus
from tests.gpu.simulated.install import Simulated
from tests.gpu.simulated.machine import Machine

pytestmark = pytest.mark.usefixtures("in_tmp_path")
STEADY = 3  # by then optimizer states and the like are made, and DDP has dealt out its buckets
BASE: dict[str, Any] = {"batch_size": 8, "epochs": 2, "save_dir": "run", "schedule": "constant", "warmup_epochs": 0}
DIGITS = {"data": "digits", "model": "mlp", "batch_size": 128, "global_batch_size": 500}
CONVNET = {"model": "convnet", "sets": ["model.args.width=4"]}
SMALL = {"sets": ["model.args.depth=1", "model.args.heads=2", "model.args.width=16"]}
TEXT = {"data": "tests.support.user_code:sentences", "model": "gpt", "task": "language-model"} | SMALL


def refuse_waits(sim: Simulated) -> None:
    """From here on in this process, a steady step in which the host waits is an error that names the lines.

    And a step with the kernels of another kind of run is one: --exact has deterministic ones, without TF32.
    """
    real = engine.train_step

    def step(run: Run, layout: StepLayout, work: Iterator[Batch]) -> StepResult:
        kernels = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
        assert kernels == ((True, "highest") if run.spec.config.reproducibility.exact else (False, "high"))
        with sim.record.watching() as events:
            outcome = real(run, layout, work)
            run.observer.loss._copied = -math.inf  # else a loss for the progress bar is read once a second
            run.read_newest_numbers()
        waits = {
            f"{event.what} of {event.bytes} bytes, {event.place}"
            for event in events
            if event.kind in ("sync", "pageable") and not event.thread.startswith("checkpoint")
        }
        assert layout.step < STEADY or not waits, f"step {layout.step} waits for the GPU: {waits}"
        return outcome

    engine.train_step = step


RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "bf16, average": (1, DIGITS | {"ema": "0.9", "amp": "bf16"}),
    "data on the host": (1, DIGITS | {"data_on_device": "off", "amp": "off", "optimizer": "sgd"}),
    "fp16, average": (1, DIGITS | {"amp": "fp16", "ema": "0.9", "nonfinite": "stop"}),
    "exact": (1, DIGITS | CONVNET | {"exact": True, "amp": "off", "max_grad_norm": "off"}),
    "sample by sample": (1, {"data": "tests.support.user_code:Items", "num_workers": 0}),
    "tokens, clipped": (1, TEXT | {"max_grad_norm": "0.1"}),
    "dp": (1, DIGITS | {"multi_gpu": "dp", "ema": "0.9"}),
    "ddp, average": (2, DIGITS | CONVNET | {"ema": "0.9", "grad_compression": "bf16"}),
    "ddp, fp16, data on the host": (2, DIGITS | {"amp": "fp16", "data_on_device": "off"}),
    "ddp, low rank": (2, DIGITS | {"grad_compression": "powersgd"}),
    "ddp, exact": (2, DIGITS | {"exact": True}),
    "ddp, tokens": (2, TEXT | {"batch_size": 3, "global_batch_size": 20}),
}


@pytest.mark.parametrize("run", RUNS)
def test_the_host_waits_for_nothing_in_a_steady_step(run: str) -> None:
    workers, flags = RUNS[run]
    machine = Machine.of(2 if flags.get("multi_gpu") == "dp" else workers)
    ended = train_on_gpus(workers, machine=machine, prepare=refuse_waits, **BASE | flags)
    assert ended.error == ""
    assert ended.summary["steps"] > STEADY
    assert len(ended.summary["peak_memory_bytes"]) == workers
    assert ended.summary["device"] == machine.gpus[0].name
