"""Speed and correctness of all-reduces between real workers of this machine, and the speed of their two halves."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from multigpu_cli.commands.doctor.system import Finding, warn_if
from multigpu_cli.config.schema import DeviceConfig
from multigpu_cli.distributed.placement import Placement
from multigpu_cli.distributed.process_group import join_workers
from multigpu_cli.distributed.world import (
    World,
    all_gather_single,
    all_reduce_max,
    is_out_of_memory,
    reduce_scatter_single,
)
from multigpu_cli.launch import run_in_workers


def all_gather(whole: Tensor) -> None:
    """Put each worker's part of a tensor (n), n / workers elements, into all workers' tensors."""
    all_gather_single(whole, _own_part(whole).clone())


def reduce_scatter(whole: Tensor) -> None:
    """Sum a tensor (n) over the workers; each has its own part of the sum, n / workers elements, in its place."""
    part = _own_part(whole)
    total = part.clone()
    reduce_scatter_single(total, whole)
    part.copy_(total)


def _own_part(whole: Tensor) -> Tensor:
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


LONGEST_WAIT = 60.0  # seconds in a collective
_ROUNDS = 5
_SMALL = 8  # bytes
_SIZES = {"cpu": (2**18, 2**20, 2**24), "cuda": (2**20, 2**24, 2**28)}  # bytes
_COPIED = 2**28  # bytes
_MOST_IN_PAIRS = 8  # workers: 28 pairs
_HALVES = {"all-gather": all_gather, "reduce-scatter": reduce_scatter}


def measure_allreduce(world: World) -> dict[str, Any]:
    """Measure on all workers together; the same result on all ranks, except for times of rank 0's clock.

    Returns:
        backend, workers, wrong (ranks whose sums were wrong), latency (seconds), by_size ([bytes, seconds]), halves
        (the same of all-gather and reduce-scatter, which --multi-gpu fsdp uses), and pairs ([one, other, seconds,
        wrong]) where there are more than two workers.
    """
    sizes = _SIZES["cuda" if world.device.type == "cuda" else "cpu"]
    own_is_wrong = not _sums_correctly(world)
    wrong = all_reduce_max(world, [float(own_is_wrong and rank == world.rank) for rank in range(world.size)])
    return {
        "backend": dist.get_backend(),
        "workers": world.size,
        "wrong": [rank for rank, is_wrong in enumerate(wrong) if is_wrong],
        "latency": _time_allreduce(world, _SMALL),
        "by_size": [[size, _time_allreduce(world, size)] for size in sizes],
        "halves": {
            name: [[size, _time_collective(world, size, work)] for size in sizes] for name, work in _HALVES.items()
        },
        "pairs": list(_measure_pairs(world, sizes[1])) if 2 < world.size <= _MOST_IN_PAIRS else [],
    }


def measure_in_workers(placement: Placement) -> dict[str, Any]:
    """Have `placement.launch` real workers measure; WorkersFailed: they could not."""
    return run_in_workers(placement, _run_worker)[0]


def _run_worker() -> dict[str, Any]:
    with join_workers(DeviceConfig(), LONGEST_WAIT) as (_, world):
        return measure_allreduce(world)


def judge_allreduce(measured: Mapping[str, Any]) -> Iterator[Finding]:
    """Findings from the measurements.

    The bus bandwidth is the rate of each connection: 2 (n-1)/n times the bytes, per second, as in nccl-tests; half as
    many bytes for a gather or a scatter.
    """
    workers, name = measured["workers"], f"all-reduce ({measured['backend']})"
    size, seconds = measured["by_size"][-1]
    bus = 2 * (workers - 1) / workers * size / seconds
    evidence = f"{workers} workers: {1e6 * measured['latency']:.0f} µs for {_SMALL} bytes, "
    evidence += f"{_format_rate(bus)} over {size / 2**20:.0f} MiB"
    if measured["wrong"]:
        evidence += f"\nthe sum was wrong on ranks {', '.join(map(str, measured['wrong']))}"
        fix = "NCCL_P2P_DISABLE=1 shows whether peer access is the cause"
        yield Finding(name, "fail", evidence, fix, dict(measured))
    else:
        yield Finding(name, "ok", f"{evidence}, sums are right", "", dict(measured))
    for half, by_size in measured["halves"].items():
        size, seconds = by_size[-1]
        rate = (workers - 1) / workers * size / seconds
        evidence = f"{workers} workers: {_format_rate(rate)} over {size / 2**20:.0f} MiB"
        yield Finding(f"{half} ({measured['backend']})", "ok", evidence, "", {"by_size": by_size})
    if measured["pairs"]:
        yield _judge_pairs(measured["pairs"], measured["by_size"][1][0])


def _judge_pairs(pairs: list[list[Any]], size: int) -> Finding:
    """Compare pairs of workers; between two of them the bus carries as many bytes as the message has."""
    usual = statistics.median(seconds for *_, seconds, _ in pairs)
    bad = [pair for pair in pairs if pair[3]]
    slow = [pair for pair in pairs if pair[2] > 2 * usual]
    if not bad and not slow:
        return Finding("pairs", "ok", f"{len(pairs)} pairs, each about {_format_rate(size / usual)}")
    listed = ", ".join(
        f"{one}-{other} {'wrong' if wrong else _format_rate(size / seconds)}"
        for one, other, seconds, wrong in bad + slow
    )
    evidence = f"usual {_format_rate(size / usual)}, but {listed}"
    return Finding("pairs", "fail" if bad else "warn", evidence, "look at these GPUs: nvidia-smi topo -m; dmesg")


def check_host_to_device(device: torch.device) -> Finding:
    """Host memory to GPU memory, pinned and pageable."""
    name = f"host to GPU {device.index or 0}"
    try:
        rates = _measure_copies(device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        evidence = f"its memory is full: {_COPIED / 2**20:.0f} MiB could not be allocated"
        return Finding(name, "warn", evidence, "nvidia-smi shows which processes use it")
    evidence = ", ".join(f"{_format_rate(rate)} {kind}" for kind, rate in rates.items())
    fix = "nvidia-smi -q -d PCIE shows whether the link has fewer lanes or a lower generation than it should"
    return warn_if(rates["pinned"] < 5e9, name, evidence, fix, rates)


def _measure_copies(device: torch.device) -> dict[str, float]:
    """Bytes a second, pinned and pageable."""
    rates = {}
    there = torch.empty(_COPIED, dtype=torch.uint8, device=device)
    for kind in ("pinned", "pageable"):
        here = torch.ones(_COPIED, dtype=torch.uint8, pin_memory=kind == "pinned")
        seconds = []
        for _ in range(_ROUNDS):
            torch.cuda.synchronize(device)
            began = time.perf_counter()
            there.copy_(here, non_blocking=True)
            torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - began)
        rates[kind] = _COPIED / statistics.median(seconds)
    return rates


def _sums_correctly(world: World) -> bool:
    """All-reduce whole numbers, whose sum is exact in float32 in any order."""
    place = torch.arange(100_003, dtype=torch.float32, device=world.device) % 997
    value = place * (world.rank + 1)
    dist.all_reduce(value)
    return bool(torch.equal(value, place * (world.size * (world.size + 1) // 2)))


def _time_allreduce(world: World, size: int, group: dist.ProcessGroup | None = None) -> float:
    return _time_collective(world, size, lambda value: dist.all_reduce(value, group=group), group)


def _time_collective(
    world: World, size: int, work: Callable[[Tensor], object], group: dist.ProcessGroup | None = None
) -> float:
    """The median time of one call with a tensor of so many bytes, in equal parts for all workers."""
    part = max(1, -(-size // (4 * world.size)))
    value = torch.zeros(part * world.size, dtype=torch.float32, device=world.device)
    times = max(1, min(20, 2**22 // size))
    wait = torch.get_device_module(world.device).synchronize
    seconds = []
    for _ in range(_ROUNDS + 1):  # the first one connects
        dist.barrier(group)
        wait()
        began = time.perf_counter()
        for _ in range(times):
            work(value)
        wait()
        seconds.append((time.perf_counter() - began) / times)
    return statistics.median(seconds[1:])


def _measure_pairs(world: World, size: int) -> Iterator[list[Any]]:
    for one, other in combinations(range(world.size), 2):
        group = dist.new_group([one, other])
        seconds, wrong = 0.0, 0.0
        if world.rank in (one, other):
            seconds = _time_allreduce(world, size, group)
            value = torch.full((size // 4,), float(world.rank + 1), device=world.device)
            dist.all_reduce(value, group=group)
            wrong = float(not torch.equal(value, torch.full_like(value, float(one + other + 2))))
        worst = all_reduce_max(world, [seconds, wrong])
        dist.destroy_process_group(group)
        yield [one, other, worst[0], bool(worst[1])]


def _format_rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.3g} GB/s"
