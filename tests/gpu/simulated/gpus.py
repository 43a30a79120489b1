"""Simulated GPUs for a test: the program itself, unchanged, takes its CUDA path on a CPU build of torch.

    alone(work)                          work(sim) in a forked process with two GPUs; what it returned
    each_rank(2, work)                   work(sim, world) on two ranks, rank n on cuda:n, with "nccl" between them
    train_on_gpus(2, prepare=look)       a whole run, as in support/run_training.py; look(sim) in each rank before it
    front_door("--multi-gpu", "ddp")     main_multi_gpu.py (torchrun=2: under torchrun) as a process of its own
    machine=Machine.of(4, memory=2**20)  in all of them: other GPUs; Machine((Gpu(…), Gpu(…))) for unlike ones
    CUDA_VISIBLE_DEVICES                 in the environment leaves some of them out, as on a real machine

    with sim.record.watching() as events: …      every host sync, asynchronous copy, … with the line that asked for it
    Machine(record=FILE), events_in(FILE)        the same from all processes of a run
    sim.device.fail_allocation(0, 3, 1024)       on cuda:0 the fourth allocation from now of 1 KiB or more has no room
    sim.device.kernels()                         launches by operator since the last call
    Gpu(nvml={"busy": 90, "power": None, "lost": "GPU is lost"}), Machine(no_nvml="Driver Not Loaded")

Work happens in processes forked from the test's own, which stays without GPUs: it can't be turned back. Without a C++
compiler the test is skipped, and where CI is set in the environment it fails. A copy between page-locked memory and a
GPU lands when its stream is waited for, not before, and until then its target holds 0xFF bytes (NaN). What is not
simulated: speed (kernels run at once, on the CPU), Triton and so torch.compile, CUDA graphs, CUDA's own bits (they are
the CPU's), races between kernels of two streams, cuDNN, memory that a kernel needs only while it runs, NCCL that hangs
or aborts, memory shared between processes, torch.load onto a GPU, the profiler's view of kernels.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from multigpu_cli.distributed.world import World
from tests.gpu.simulated import build
from tests.gpu.simulated.install import Simulated, install
from tests.gpu.simulated.machine import Machine
from tests.gpu.simulated.record import Event
from tests.support import ranks
from tests.support.run_training import Ended
from tests.support.run_training import run_training as trained_anywhere

TWO = Machine()
_ROOT = Path(__file__).resolve().parents[3]


def alone(work: Callable[[Simulated], Any], machine: Machine = TWO) -> Any:
    """Do `work` in a process without ranks; what it returned (plain values, no tensors)."""

    def join(store: dist.Store, rank: int, size: int) -> Any:
        return install(machine)

    _require_compiler()
    return ranks.run_on_each_rank(1, work, join)[0]  # type: ignore[arg-type]


def each_rank(size: int, work: Callable[[Simulated, World], Any], machine: Machine = TWO) -> list[Any]:
    """Do `work` on all ranks at once; what it returned (plain values, no tensors), in rank order."""

    def join(store: dist.Store, rank: int, size: int) -> Any:
        sim, device = install(machine), torch.device("cuda", rank)
        torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl", store=store, rank=rank, world_size=size, timeout=ranks.TIMEOUT, device_id=device
        )
        return sim, World(device, rank, size, rank, size)

    _require_compiler()
    return ranks.run_on_each_rank(size, lambda joined: work(*joined), join)  # type: ignore[misc]


def train_on_gpus(
    workers: int = 1,
    *,
    machine: Machine = TWO,
    prepare: Callable[[Simulated], object] = lambda sim: None,
    **request: Any,
) -> Ended:
    """Train on so many workers, each a forked process; see tests/support/run_training.py for the rest."""
    _require_compiler()
    return trained_anywhere(workers, prepare=lambda: prepare(install(machine)), **request)


def front_door(
    *words: str, machine: Machine = TWO, torchrun: int = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the command line with these words and environment variables; with `torchrun`, in so many processes."""
    _require_compiler()
    launcher = [sys.executable]
    if torchrun:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={torchrun}"]
    environment = machine.environment(os.environ | variables)
    command = [*launcher, str(_ROOT / "main_multi_gpu.py"), *words]
    return subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=180, check=False)


def events_in(file: Path) -> list[tuple[int, Event]]:
    """What processes have appended to a machine's record, with their rank."""
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [(int(line.pop("rank")), Event(**{name: line[name] for name in Event._fields})) for line in lines]


def _require_compiler() -> None:
    try:
        build.build_library()
    except build.NoCompiler as missing:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(missing))
