"""--exact under --amp off: GPUs with the kernels of the CPU come to its bits, by whatever path they take.

Sharded, too: these GPUs round the end of a tensor otherwise, as the CPU does.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.simulated import gpus
from tests.gpu.simulated.machine import Gpu, Machine
from tests.support.run_training import run_training

SMALL = ["model.args.depth=1", "model.args.heads=2", "model.args.width=16", "model.args.dropout=0.2"]
RUNS: dict[str, dict[str, Any]] = {
    "perceptron": {"epochs": 1},
    "attention": {
        "data": "tests.support.user_code:sentences",
        "model": "gpt",
        "task": "language-model",
        "epochs": 1,
        "sets": SMALL,
    },
    "convolution": {"data": "digits", "model": "convnet", "max_steps": 4, "ema": "0.9", "max_grad_norm": 0.1},
    "sgd": {"optimizer": "sgd", "epochs": 1},
}
EXACT: dict[str, Any] = {"exact": True, "amp": "off", "batch_size": 5, "global_batch_size": 20, "log_interval": 1}


@pytest.mark.parametrize("what", RUNS)
def test_gpus_come_to_the_bits_of_the_cpu(what: str, tmp_path: Path) -> None:
    flags = EXACT | RUNS[what]
    on_cpu = run_training(1, **flags, save_dir=str(tmp_path / "cpu"))
    on_gpus = [
        gpus.train_on_gpus(count, machine=Machine.of(count), **flags, save_dir=str(tmp_path / f"gpu{count}"))
        for count in (1, 2)
    ]
    sharded = {"multi_gpu": "fsdp", "machine": Machine.of(3), "save_dir": str(tmp_path / "sharded")}
    on_gpus.append(gpus.train_on_gpus(3, **flags | sharded))
    assert [ended.error for ended in (on_cpu, *on_gpus)] == [""] * 4
    assert {ended.summary["device"] for ended in on_gpus} == {Gpu().name}
    assert {ended.summary["fingerprint"] for ended in on_gpus} == {on_cpu.summary["fingerprint"]}
