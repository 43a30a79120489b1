"""Ways to share out the work, as far as one GPU can show them."""

import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from multigpu_cli import engine
from multigpu_cli.config.sources import resolve
from multigpu_cli.distributed.launch_env import LaunchEnv
from multigpu_cli.distributed.placement import Placement
from multigpu_cli.engine import train_step
from multigpu_cli.monitor.console import Console
from multigpu_cli.run.open import resolve_request
from multigpu_cli.run.request.spec import FromConfig
from tests.gpu.front_door import ALONE, DIGITS, GOOD_ENOUGH, holds, launcher, run, run_command, same_weights, words
from tests.gpu.in_process import GPU, ONE_RANK, check_device, raise_again, train


def one_nccl_rank(folder: Path) -> dict[str, Any]:
    """Under torchrun; and in this process, where the backend of the group can be seen."""
    seen: list[str] = []

    def step(*given: Any) -> Any:
        seen.append(dist.get_backend())
        return train_step(*given)

    with patch.object(engine, "train_step", step):
        check_device(train(folder / "here", ONE_RANK, max_steps="20", amp="bf16"), "ddp", "bf16")
    assert set(seen) == {"nccl"}, f"backend {set(seen)}"
    done = run(folder / "torchrun", *words(DIGITS), "--multi-gpu", "ddp", "--amp", "bf16", ranks=1)
    return holds(done, "ddp", "bf16") | {"backend": "nccl"}


def one_sharded_rank(folder: Path) -> dict[str, Any]:
    """FSDP over nccl, which has with --exact the bits of a run that is not sharded."""
    done = run(folder / "sharded", *words(DIGITS), "--multi-gpu", "fsdp", "--amp", "bf16", ranks=1)
    short = ("--exact", "--max-steps", "20")
    exact = run(folder / "exact", *short, "--multi-gpu", "fsdp", ranks=1)
    same_weights(exact, run(folder / "whole", *short, *ALONE))
    return holds(done, "fsdp", "bf16")


def self_launched(folder: Path) -> dict[str, Any]:
    flags = ("--multi-gpu", "ddp", "--nproc-per-node", "1", "--amp", "bf16")
    return holds(run(folder, *words(DIGITS), *flags), "ddp", "bf16")


def two_gloo_ranks_on_one_gpu(folder: Path) -> dict[str, Any]:
    """Two nccl ranks could not share a GPU."""
    done = run_command([*launcher(2), "-m", "tests.gpu.checks.strategies", str(folder)], folder)
    assert done.summary["world_size"] == 2, done.summary
    return holds(done, "ddp", "bf16")


def data_parallel_twice(folder: Path) -> dict[str, Any]:
    """DataParallel over [0, 0]: the command line refuses to name a GPU twice."""
    choice = Placement("dp", (GPU, GPU), 0, "DataParallel over [0, 0]")
    summary = train(folder, choice, amp="bf16", batch_size="16", **DIGITS)
    check_device(summary, "dp", "bf16")
    assert summary["devices"] == 2, summary
    accuracy = summary["final"]["test_accuracy"]
    assert accuracy >= GOOD_ENOUGH, f"test accuracy {accuracy:.1%}"
    return {"test_accuracy": accuracy, "samples_per_second": summary["samples_per_second"]}


def one_of_two_ranks(folder: str) -> None:
    """What torchrun starts for `two_gloo_ranks_on_one_gpu`."""
    launch_env = LaunchEnv.current()
    config = resolve({"amp": "bf16", "batch_size": "16", "save_dir": folder, **DIGITS}, [], None)
    choice = Placement("ddp", (GPU,), 0, "two gloo ranks on one GPU", backend="gloo")
    console = Console("silent" if launch_env and launch_env.rank else "normal", json=True)
    with resolve_request(config, choice, launch_env, console, raise_again, FromConfig()) as request:
        engine.run(request)


if __name__ == "__main__":
    one_of_two_ranks(sys.argv[1])
    sys.stdout.flush()
    os._exit(0)  # past torch's exit, where gloo now and then aborts a run that is done
