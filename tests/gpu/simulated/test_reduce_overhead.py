"""--compile reduce-overhead with a stand-in for CUDA graphs, of which a real GPU alone knows the rest."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.simulated.gpus import train_on_gpus
from tests.gpu.simulated.install import Simulated
from tests.gpu.simulated.machine import Machine
from tests.runtime.test_compile import in_graphs

pytestmark = pytest.mark.usefixtures("in_tmp_path")
RUN: dict[str, Any] = {"batch_size": 5, "global_batch_size": 20, "epochs": 2, "amp": "off", "num_workers": 0}


def use_stand_in(sim: Simulated) -> None:
    torch.compile = in_graphs  # type: ignore[assignment]


@pytest.mark.parametrize("workers", [1, 2])
def test_accumulated_gradients_are_those_without_graphs(workers: int) -> None:
    ended = [
        train_on_gpus(workers, machine=Machine.of(workers), prepare=use_stand_in, compile=mode, save_dir=mode, **RUN)
        for mode in ("off", "reduce-overhead")
    ]
    assert [end.error for end in ended] == [""] * 2
    assert len({end.summary["fingerprint"] for end in ended}) == 1
    assert ended[0].summary["device"] == Machine().gpus[0].name


def test_with_exact_it_is_refused() -> None:
    ended = train_on_gpus(machine=Machine.of(1), compile="reduce-overhead", exact=True, save_dir="run", **RUN)
    assert ended.kind == "RequestError"
    assert "--compile reduce-overhead" in ended.error
    assert not Path("run").exists()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_replicas_of_data_parallel_are_not_compiled(mode: str) -> None:
    """Those on other GPUs would run what was compiled for the weights of the first."""
    run: dict[str, Any] = {"multi_gpu": "dp", "compile": mode, "save_dir": "run", "batch_size": 5}
    ended = train_on_gpus(prepare=use_stand_in, **run)
    assert ended.kind == "RequestError", ended.error
    assert ended.error.startswith(f"--compile {mode} can't be used with --multi-gpu dp: ")
    assert not Path("run").exists()
