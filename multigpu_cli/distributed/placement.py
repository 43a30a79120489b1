"""Chooses strategy, devices and number of processes of a run, with the reason for the choice."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from multigpu_cli.capabilities import MULTI_PROCESS
from multigpu_cli.config.schema import DeviceConfig
from multigpu_cli.distributed.launch_env import LaunchEnv
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError, pluralize


class Placement(NamedTuple):
    """Strategy, devices and processes of a run."""

    strategy: str  # single, dp, ddp or fsdp
    devices: tuple[torch.device, ...]  # the device of each local worker; a single CPU process has one
    num_processes_to_launch: int  # processes that we start ourselves; 0 if this process trains
    reason: str  # the reason for the choice, which the plan shows
    backend: str | None = None  # of the process group; None uses the default for the device
    timeout: float | None = None  # timeout of its collectives in seconds; None uses what the watchdog needs


def count_visible_gpus() -> int:
    """Number of CUDA devices that this process may use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def usable_gpus(wanted: DeviceConfig, gpus: int | None = None) -> tuple[int, ...]:
    """The GPUs that --gpu-ids names, which must exist, or all visible ones, by default as CUDA counts; none on CPU."""
    gpus = count_visible_gpus() if gpus is None else gpus
    check_gpus_exist("--gpu-ids", wanted.gpu_ids or (), gpus)
    return wanted.gpu_ids or tuple(range(gpus))


def count_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_placement(wanted: DeviceConfig, *, gpus: int, cpus: int, launch_env: LaunchEnv | None) -> Placement:
    """Choose strategy and devices from settings, hardware and launcher, or raise a RequestError."""
    if launch_env is not None:  # a self-launch has applied --gpu-ids already: its workers see only those, from 0
        return _place_under_launcher(wanted, gpus, launch_env)
    ids = usable_gpus(wanted, gpus)
    if wanted.multi_gpu == "dp":
        if len(ids) >= 2:
            return Placement("dp", cuda_devices(ids), 0, f"--multi-gpu dp on GPUs {_join_ids(ids)}")
        return _place_single(ids, f"--multi-gpu dp needs two GPUs and there {'is one' if ids else 'are none'}")
    if wanted.multi_gpu == "none":
        return _place_single(ids, "--multi-gpu none")
    if wanted.multi_gpu in MULTI_PROCESS or wanted.nproc_per_node or len(ids) > 1:
        return _place_self_launched(wanted, ids, cpus)
    return _place_single(ids, "one GPU" if ids else _explain_no_gpu())


def _place_under_launcher(wanted: DeviceConfig, gpus: int, launch_env: LaunchEnv) -> Placement:
    processes = f"{launch_env.launcher} {launch_env.size} process{'es' if launch_env.size > 1 else ''}"
    if wanted.multi_gpu == "none" and launch_env.size > 1:
        problem = f"--multi-gpu none, but {processes}"
        raise RequestError(problem, remedy="use python main_multi_gpu.py --multi-gpu none, without torchrun")
    strategy = _name_strategy(wanted)
    if not gpus:
        return Placement(strategy, (torch.device("cpu"),), 0, f"{processes}; {_explain_no_gpu()}, so on CPU")
    return Placement(strategy, cuda_devices((find_own_gpu(launch_env, gpus),)), 0, processes)


def _explain_no_gpu() -> str:
    return "Apple GPUs are not supported" if torch.backends.mps.is_available() else "no GPU found"


def _name_strategy(wanted: DeviceConfig) -> str:
    """The strategy of several processes: ddp, where nothing else is asked for."""
    return wanted.multi_gpu if wanted.multi_gpu in MULTI_PROCESS else "ddp"


def find_own_gpu(launch_env: LaunchEnv, gpus: int) -> int:
    """The GPU of a launcher's process, never one for several: that of its local rank, or the only visible one.

    The only visible GPU may be a different one for each process or the same; check_own_gpus finds out after rendezvous.
    """
    if gpus == 1:
        return 0
    if max(launch_env.local_size, launch_env.local_rank + 1) > gpus:
        started = f"torchrun started {launch_env.local_size} processes"
        beyond = f"LOCAL_RANK={launch_env.local_rank} in the environment"
        raise RequestError(
            f"{started if launch_env.local_size > gpus else beyond} on a machine with {pluralize(gpus, 'visible GPU')}",
            remedy=f"use --nproc_per_node={gpus}, or set CUDA_VISIBLE_DEVICES= to train on CPU",
        )
    return launch_env.local_rank


def _place_self_launched(wanted: DeviceConfig, ids: tuple[int, ...], cpus: int) -> Placement:
    if not ids:
        count = wanted.nproc_per_node or min(2, cpus)
        reason = f"self-launched on {count} CPU process{'es' if count > 1 else ''}, {_explain_no_gpu()}"
        return Placement(_name_strategy(wanted), (torch.device("cpu"),) * count, count, reason)
    count = wanted.nproc_per_node or len(ids)
    if count > len(ids):
        problem = f"--nproc-per-node {count}, but only {pluralize(len(ids), 'GPU')} to use: {_join_ids(ids)}"
        remedy = f"use --nproc-per-node {len(ids)}, or set CUDA_VISIBLE_DEVICES= to train on CPU"
        raise RequestError(problem, remedy=remedy)
    reason = f"self-launched on GPUs {_join_ids(ids[:count])}"
    return Placement(_name_strategy(wanted), cuda_devices(ids[:count]), count, reason)


def _place_single(ids: tuple[int, ...], reason: str) -> Placement:
    device = cuda_devices(ids[:1])[0] if ids else torch.device("cpu")
    where = f"GPU {ids[0]}" if ids else "CPU"
    return Placement("single", (device,), 0, f"{reason}: one process on {where}")


def check_gpus_exist(name: str, ids: Sequence[int], gpus: int) -> None:
    """Raise a RequestError unless all GPUs exist that the flag or argument of this name gives."""
    if absent := [number for number in ids if not 0 <= number < gpus]:
        visible = f"visible: {_join_ids(range(gpus))}" if gpus else "no GPU is visible"
        problem = f"{name} {_join_ids(ids)}: there is no GPU {_join_ids(absent)} ({visible})"
        raise RequestError(problem, remedy=f"leave {name} out to use " + ("all visible GPUs" if gpus else "the CPU"))


def cuda_devices(ids: tuple[int, ...]) -> tuple[torch.device, ...]:
    return tuple(torch.device("cuda", number) for number in ids)


def gpu_models(placement: Placement, world: World) -> dict[int, str]:
    """The model of each rank's GPU by rank, or of each GPU of this process by index; empty on CPU."""
    if world.size > 1:
        return {rank: gpu.model for rank, gpu in enumerate(world.gpus) if gpu}
    gpus = (device for device in placement.devices if device.type == "cuda")
    return {device.index or 0: torch.cuda.get_device_name(device) for device in gpus}


def describe_unlike_gpus(models: Mapping[int, str], whose: str) -> str:
    """A warning that names GPUs of different models, from `gpu_models`, by rank or "GPU"; "" if all are alike."""
    if len(kinds := dict.fromkeys(models.values())) < 2:
        return ""
    places = {kind: [str(number) for number, model in models.items() if model == kind] for kind in kinds}
    named = [f"{kind} ({whose} {', '.join([*ids[:8], *(['…'] if ids[8:] else [])])})" for kind, ids in places.items()]
    return f"GPUs of several models: {' and '.join(named)}; all get equal shares, so the slowest one limits the speed"


def _join_ids(ids: Iterable[int]) -> str:
    return ",".join(map(str, ids))
