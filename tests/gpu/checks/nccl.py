"""NCCL itself: every collective that a training calls, how it rounds, and how fast it is."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from multigpu_cli.distributed.process_group import process_group
from tests.gpu.front_door import launcher
from tests.gpu.in_process import GPU, alone
from tests.gpu.machine import ROOT, is_simulated, patience

_FORMATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
_NUMBERS = 2**16 if is_simulated() else 2**26
_WAYS = ("", "Ring") if is_simulated() else ("", "Ring", "Tree", "NVLS")  # of NCCL_ALGO; "": NCCL's own choice


def collectives_of_one_rank(folder: Path) -> dict[str, Any]:
    """In a world of one each gives back what it got: kernels, formats and streams are those of many ranks."""
    with process_group(alone(), GPU, timeout=60) as world:
        for dtype in _FORMATS:
            given = torch.arange(1, 129, device=GPU).to(dtype)
            summed, gathered, scattered, dealt = given.clone(), *(torch.zeros_like(given) for _ in range(3))
            dist.all_reduce(summed)
            dist.all_gather_into_tensor(gathered, given)
            dist.reduce_scatter_tensor(scattered, given)
            dist.all_to_all_single(dealt, given)
            dist.broadcast(dealt, src=0)
            for name, found in {
                "reduce": summed,
                "gather": gathered,
                "scatter": scattered,
                "all to all": dealt,
            }.items():
                assert torch.equal(found, given), f"{name} of {dtype}: {found} instead of {given}"
        dist.barrier()
    return {"backend": "nccl", "formats": [str(dtype) for dtype in _FORMATS], "ranks": world.size}


def rounding_of_all_reduce(folder: Path) -> dict[str, Any]:
    """Whether the sum of float32 over all GPUs is the exactly rounded one, by each of NCCL's algorithms.

    In NVLink's switches (NVLS) it may be: --exact would then cost little more than ddp. It is no failure if it is not,
    but the same numbers have to give the same sum twice.
    """
    found = {}
    for way in _WAYS:
        environ = os.environ | ({"NCCL_ALGO": way} if way else {})
        done = _run_ranks("_round", environ)
        found[way or "NCCL's choice"] = done if isinstance(done, str) else done[0]
    measured = [each for each in found.values() if isinstance(each, dict)]
    assert measured, f"no algorithm ran: {found}"
    assert all(each["same_twice"] for each in measured), f"another sum of the same numbers: {found}"
    return found


def bus_rate(folder: Path) -> dict[str, Any]:
    """All-reduce of a large float32 tensor, as nccl-tests count it."""
    found = _run_ranks("_time", os.environ)
    assert not isinstance(found, str), found
    return {"bus_gigabytes_per_second": min(each["bus"] for each in found), "bytes": 4 * _NUMBERS}


def _run_ranks(name: str, environ: Any) -> list[dict[str, Any]] | str:
    """What a function below returns on each GPU, by rank; or the last line of why it failed."""
    command = [*launcher(torch.cuda.device_count()), "-m", "tests.gpu.checks.nccl", name]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=patience(120), check=False
    )
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: int(line["rank"]))


def _round(rank: int, device: torch.device) -> dict[str, Any]:
    own = _draw(rank, device)
    total = sum(_draw(other, device).double() for other in range(dist.get_world_size()))  # exact: 8 × 24 bits fit in 53
    assert isinstance(total, torch.Tensor)
    sums = [own.clone(), own.clone()]
    for each in sums:
        dist.all_reduce(each)
    return {
        "exactly_rounded": float((sums[0] == total.float()).double().mean()),
        "same_twice": torch.equal(*sums),
    }


def _draw(rank: int, device: torch.device) -> torch.Tensor:
    """(n,) of a gradient's sizes, the same wherever it is drawn: within 2^-8 … 1, so that a float64 holds their sum."""
    generator = torch.Generator().manual_seed(rank)
    drawn = torch.rand(_NUMBERS // 4, generator=generator)
    return torch.where(drawn < 0.5, -1.0, 1.0).mul_(drawn * (1 - 2**-8) + 2**-8).to(device)


def _time(rank: int, device: torch.device) -> dict[str, Any]:
    numbers, ranks, times = torch.zeros(_NUMBERS, device=device), dist.get_world_size(), 20
    for _ in range(5):
        dist.all_reduce(numbers)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        dist.all_reduce(numbers)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / times
    return {"bus": 2 * (ranks - 1) / ranks * numbers.nbytes / seconds / 1e9}


def _main(name: str) -> None:
    """One rank of `_run_ranks`."""
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    found = {"_round": _round, "_time": _time}[name](rank, device)
    dist.barrier()
    os.write(1, f"{json.dumps({'rank': rank} | found)}\n".encode())  # at once: all ranks have one pipe
    os._exit(0)  # past torch's exit, where gloo now and then aborts a process that is done


if __name__ == "__main__":
    _main(sys.argv[1])
