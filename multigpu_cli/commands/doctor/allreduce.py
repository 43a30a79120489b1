"""How fast and how right this machine's processes add up tensors: real all-reduces between real workers."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist

from multigpu_cli.commands.doctor.findings import Finding
from multigpu_cli.config.schema import DeviceConfig
from multigpu_cli.launch import run_in_workers
from multigpu_cli.runtime.collectives import all_reduce_max
from multigpu_cli.runtime.device_placement import Placement, choose_placement, count_cores, count_visible_gpus
from multigpu_cli.runtime.launch_env import LaunchEnv
from multigpu_cli.runtime.out_of_memory import is_out_of_memory
from multigpu_cli.runtime.process_group import process_group
from multigpu_cli.runtime.world import World

LONGEST_WAIT = 60.0  # seconds in a collective
_ROUNDS = 5
_SMALL = 8  # bytes
_SIZES = {"cpu": (2**18, 2**20, 2**24), "cuda": (2**20, 2**24, 2**28)}  # bytes
_COPIED = 2**28  # bytes
_MOST_IN_PAIRS = 8  # workers: 28 pairs


def measure_allreduce(world: World) -> dict[str, Any]:
    """What every worker measures together; the same on all ranks, but for rank 0's clock.

    Returns:
        backend, workers, wrong (ranks whose sums were wrong), latency (seconds), by_size ([bytes, seconds]), and pairs
        ([one, other, seconds, wrong]) where there are more than two workers.
    """
    sizes = _SIZES["cuda" if world.device.type == "cuda" else "cpu"]
    wrong = all_reduce_max(
        world, [float(world.rank == rank and not _sums_correctly(world)) for rank in range(world.size)]
    )
    return {
        "backend": dist.get_backend(),
        "workers": world.size,
        "wrong": [rank for rank, is_wrong in enumerate(wrong) if is_wrong],
        "latency": _time_allreduce(world, _SMALL),
        "by_size": [[size, _time_allreduce(world, size)] for size in sizes],
        "pairs": list(_measure_pairs(world, sizes[1])) if 2 < world.size <= _MOST_IN_PAIRS else [],
    }


def measure_in_workers(placement: Placement) -> dict[str, Any]:
    """Have `placement.launch` real workers measure.

    Raises:
        WorkersFailed: they could not.
    """
    measured: dict[str, Any] = run_in_workers(placement, _run_worker)[0]
    return measured


def _run_worker() -> dict[str, Any]:
    launch_env = LaunchEnv.current()
    placement = choose_placement(DeviceConfig(), gpus=count_visible_gpus(), cpus=count_cores(), launch_env=launch_env)
    with process_group(launch_env, placement.devices[0], timeout=LONGEST_WAIT) as world:
        return measure_allreduce(world)


def judge_allreduce(measured: Mapping[str, Any]) -> Iterator[Finding]:
    """What the measurements say.

    The bus bandwidth is what each connection carried: 2 (n-1)/n times the bytes, per second, as nccl-tests have it.
    """
    workers, name = measured["workers"], f"all-reduce ({measured['backend']})"
    size, seconds = measured["by_size"][-1]
    bus = 2 * (workers - 1) / workers * size / seconds
    evidence = f"{workers} workers: {1e6 * measured['latency']:.0f} µs for {_SMALL} bytes, "
    evidence += f"{_format_rate(bus)} over {size / 2**20:.0f} MiB"
    if measured["wrong"]:
        ranks = ", ".join(map(str, measured["wrong"]))
        evidence += f"\nthe sum was wrong on ranks {ranks}"
        yield Finding(
            name, "fail", evidence, "NCCL_P2P_DISABLE=1 shows whether peer access is to blame", dict(measured)
        )
    else:
        yield Finding(name, "ok", f"{evidence}, sums are right", "", dict(measured))
    if not measured["pairs"]:
        return
    usual = statistics.median(seconds for *_, seconds, _ in measured["pairs"])
    bad = [pair for pair in measured["pairs"] if pair[3]]
    slow = [pair for pair in measured["pairs"] if pair[2] > 2 * usual]
    text = ", ".join(
        f"{one}-{other} {'wrong' if wrong else _format_rate(_pair_message_bytes(measured) / s)}"
        for one, other, s, wrong in bad + slow
    )
    if bad or slow:
        more = f"usual {_format_rate(_pair_message_bytes(measured) / usual)}, but {text}"
        yield Finding("pairs", "fail" if bad else "warn", more, "look at these GPUs: nvidia-smi topo -m; dmesg")
    else:
        yield Finding(
            "pairs",
            "ok",
            f"{len(measured['pairs'])} pairs, each about {_format_rate(_pair_message_bytes(measured) / usual)}",
        )


def check_host_to_device(device: torch.device) -> Finding:
    """Host memory to GPU memory, pinned and pageable."""
    name = f"host to GPU {device.index or 0}"
    try:
        rates = _measure_copies(device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        evidence = f"its memory is full: {_COPIED / 2**20:.0f} MiB of it could not be had"
        return Finding(name, "warn", evidence, "nvidia-smi shows who has it")
    evidence = ", ".join(f"{_format_rate(rate)} {kind}" for kind, rate in rates.items())
    slow = rates["pinned"] < 5e9
    fix = "nvidia-smi -q -d PCIE: lanes or generation may have been lost" if slow else ""
    return Finding(name, "warn" if slow else "ok", evidence, fix, rates)


def _measure_copies(device: torch.device) -> dict[str, float]:
    """Bytes a second, pinned and pageable."""
    size, rates = _COPIED, {}
    there = torch.empty(size, dtype=torch.uint8, device=device)
    for kind in ("pinned", "pageable"):
        here = torch.ones(size, dtype=torch.uint8, pin_memory=kind == "pinned")
        seconds = []
        for _ in range(_ROUNDS):
            torch.cuda.synchronize(device)
            began = time.perf_counter()
            there.copy_(here, non_blocking=True)
            torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - began)
        rates[kind] = size / statistics.median(seconds)
    return rates


def _sums_correctly(world: World) -> bool:
    """A sum of whole numbers, exact in float32 whatever the order."""
    place = torch.arange(100_003, dtype=torch.float32, device=world.device) % 997
    value = place * (world.rank + 1)
    dist.all_reduce(value)
    return bool(torch.equal(value, place * (world.size * (world.size + 1) // 2)))


def _time_allreduce(world: World, size: int, group: dist.ProcessGroup | None = None) -> float:
    """The median time of one all-reduce of so many bytes."""
    value = torch.zeros(max(1, size // 4), dtype=torch.float32, device=world.device)
    times = max(1, min(20, 2**22 // size))
    wait: Callable[[], None] = torch.cuda.synchronize if world.device.type == "cuda" else lambda: None
    seconds = []
    for _ in range(_ROUNDS + 1):
        dist.barrier(group)
        wait()
        began = time.perf_counter()
        for _ in range(times):
            dist.all_reduce(value, group=group)
        wait()
        seconds.append((time.perf_counter() - began) / times)
    return statistics.median(seconds[1:])  # the first one connects


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


def _pair_message_bytes(measured: Mapping[str, Any]) -> float:
    """Of the messages between pairs; between two workers the bus carries as much as the message."""
    return float(measured["by_size"][1][0])


def _format_rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.3g} GB/s"
