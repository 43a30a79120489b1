"""Ways to share out the work, as far as one GPU can show them."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from multigpu_cli import engine
from multigpu_cli.config.sources import resolve
from multigpu_cli.distributed.launch_env import LaunchEnv
from multigpu_cli.distributed.placement import Placement
from multigpu_cli.engine import train_step
from multigpu_cli.monitor.console import Console
from multigpu_cli.run.open import resolve_request
from multigpu_cli.run.request.spec import FromConfig
from multigpu_cli.strategies.fsdp.fsdp import FSDP2
from tests.gpu.checks.attention import LENGTH, SIZE, START, TOKENS
from tests.gpu.front_door import DIGITS, GOOD_ENOUGH, holds, launcher, run, run_command, words
from tests.gpu.in_process import GPU, ONE, ONE_RANK, ONE_SHARD, check_device, count_gathers, raise_again, train

_SWAP = dist.batch_isend_irecv


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
    """FSDP over a mesh of one rank, which a run would not have: its streams, copies and allocations are real.

    It learns, and bf16 gathers half the bytes. Torch leaves out the collectives of one rank.
    """
    gathered = {}
    with patch.object(FSDP2, "min_workers", 1):
        for name, precision in (("bf16", "bf16"), ("fp32", "off")):
            with count_gathers() as seen:
                summary = train(folder / name, ONE_SHARD, SIZE, **TOKENS | LENGTH, multi_gpu="fsdp", amp=precision)
            check_device(summary, "fsdp", precision)
            assert summary["final"]["train_loss"] < START / 2, f"{name}: loss {summary['final']['train_loss']:.2f}"
            gathered[name] = sum(seen) / summary["steps"]
        assert 0 < gathered["bf16"] <= 0.51 * gathered["fp32"], f"bytes gathered in a step: {gathered}"
    return {"bytes_gathered_in_a_step": gathered}


def exact_sharded_rank(folder: Path) -> dict[str, Any]:
    """With --exact, in steps of one micro-batch, it has the bits of a run that is not sharded."""
    short: dict[str, Any] = TOKENS | LENGTH | {"max_steps": "20", "exact": "true"}
    with patch.object(FSDP2, "min_workers", 1):
        divided = train(folder / "exact", ONE_SHARD, SIZE, **short, multi_gpu="fsdp")
    whole = train(folder / "whole", ONE, SIZE, **short)
    assert divided["fingerprint"] == whole["fingerprint"], "with --exact it has other bits than one process"
    return {"fingerprint": whole["fingerprint"]}


def self_launched(folder: Path) -> dict[str, Any]:
    flags = ("--multi-gpu", "ddp", "--nproc-per-node", "1", "--amp", "bf16")
    return holds(run(folder, *words(DIGITS), *flags), "ddp", "bf16")


def two_gloo_ranks_on_one_gpu(folder: Path) -> dict[str, Any]:
    """Two nccl ranks could not share a GPU."""
    done = run_command([*launcher(2), "-m", "tests.gpu.checks.strategies", str(folder)], folder)
    assert done.summary["world_size"] == 2, done.summary
    return holds(done, "ddp", "bf16")


def data_parallel_twice(folder: Path) -> dict[str, Any]:
    """DataParallel over [0, 0]: the command line refuses to name a GPU twice. Each replica computes in bf16."""
    choice = Placement("dp", (GPU, GPU), 0, "DataParallel over [0, 0]")
    formats: set[torch.dtype] = set()

    def note(module: nn.Module, inputs: object, outputs: Tensor) -> None:
        if isinstance(module, nn.Linear) and torch.is_grad_enabled():
            formats.add(outputs.dtype)  # in a thread for each replica

    with nn.modules.module.register_module_forward_hook(note):
        summary = train(folder, choice, amp="bf16", batch_size="16", **DIGITS)
    check_device(summary, "dp", "bf16")
    assert formats == {torch.bfloat16}, f"layers compute in {formats}"
    assert summary["devices"] == 2, summary
    accuracy = summary["final"]["test_accuracy"]
    assert accuracy >= GOOD_ENOUGH, f"test accuracy {accuracy:.1%}"
    return {"test_accuracy": accuracy, "samples_per_second": summary["samples_per_second"]}


def one_of_two_ranks(folder: str, *more: str) -> None:
    """What torchrun starts for `two_gloo_ranks_on_one_gpu`, and for exact.py, which gives settings as JSON."""
    launch_env = LaunchEnv.current()
    flags, sets = json.loads(more[0]) if more else ({"amp": "bf16", "batch_size": "16", **DIGITS}, [])
    config = resolve({"save_dir": folder, **flags}, sets, None)
    choice = Placement("ddp", (GPU,), 0, "two gloo ranks on one GPU", backend="gloo")
    console = Console("silent" if launch_env and launch_env.rank else "normal", json=True)
    moved = {name: _through_host(name) for name in ("all_reduce", "broadcast")}
    with (
        patch.object(dist, "batch_isend_irecv", _swap_through_host),
        patch.multiple(dist, **cast(Any, moved)),
        resolve_request(config, choice, launch_env, console, raise_again, FromConfig()) as request,
    ):
        engine.run(request)


def _through_host(name: str) -> Callable[..., None]:
    """A collective by way of host memory: gloo has not all of them for memory of a GPU."""
    real = getattr(dist, name)

    def call(tensor: Tensor, *how: Any, **named: Any) -> None:
        host = tensor.cpu()
        real(host, *how, **named)
        tensor.copy_(host)

    return call


def _swap_through_host(wanted: list[dist.P2POp]) -> list[dist.Work]:
    """The same for what two ranks send each other."""
    there = [dist.P2POp(each.op, each.tensor.cpu(), each.peer) for each in wanted]
    for request in _SWAP(there):
        request.wait()
    for each, host in zip(wanted, there, strict=True):
        if each.op is dist.irecv:
            each.tensor.copy_(host.tensor)
    return []


if __name__ == "__main__":
    one_of_two_ranks(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # past torch's exit, where gloo now and then aborts a run that is done
