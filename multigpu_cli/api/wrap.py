"""Wrapping a model for several GPUs, for a training loop that is wholly the user's own."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from multigpu_cli.api.gpu_info import get_gpu_info
from multigpu_cli.api.settings import TrainingMode
from multigpu_cli.errors import RequestError
from multigpu_cli.runtime.placement import count_visible_gpus
from multigpu_cli.runtime.world import LaunchEnv


def setup_data_parallel(model: nn.Module, device_ids: list[int] | None = None) -> tuple[nn.Module, bool]:
    """The model in nn.DataParallel on these GPUs (default: all), and True; or as it is, and False with fewer than two.

    Raises:
        RequestError: GPUs that are not there.
    """
    ids = list(range(count_visible_gpus())) if device_ids is None else device_ids
    _check(ids)
    if len(ids) < 2:
        return model, False
    return nn.DataParallel(model.to(f"cuda:{ids[0]}"), device_ids=ids), True


def setup_distributed_data_parallel(
    model: nn.Module,
    backend: str | None = None,
    init_method: str = "env://",
    world_size: int | None = None,
    rank: int | None = None,
    device_ids: list[int] | None = None,
) -> tuple[nn.Module, bool]:
    """The model in DistributedDataParallel on this process's one device, and True; or as it is, and False.

    It joins the process group if nobody has: as torchrun says, or as `world_size` and `rank` say, with an `init_method`
    or MASTER_ADDR and MASTER_PORT. Without any of these there are no other ranks: False. Each process has one GPU, or
    the CPU (gloo). `cleanup_distributed` ends the group.

    Raises:
        RequestError: GPUs that are not there, or `world_size` and `rank` that the launcher contradicts.
    """
    launch_env = LaunchEnv.current()
    if not dist.is_initialized():
        told = rank is not None and world_size is not None
        if launch_env is None and told and init_method == "env://":
            launch_env = LaunchEnv.for_existing_group(rank or 0, world_size or 1, None)
        if launch_env is None and not told:
            return model, False
        size, mine = (launch_env.size, launch_env.rank) if launch_env else (world_size or 1, rank or 0)
        if (world_size not in (None, size)) or (rank not in (None, mine)):
            raise RequestError(f"world_size={world_size}, rank={rank}: the launcher says {size} and {mine}")
        backend = backend or ("nccl" if count_visible_gpus() else "gloo")
        if backend == "nccl" and not count_visible_gpus():
            raise RequestError("backend='nccl' needs GPUs, and none is visible", remedy="backend='gloo'")
        dist.init_process_group(backend, init_method=init_method, world_size=size, rank=mine)
    local = launch_env.local_rank if launch_env else dist.get_rank()
    if not count_visible_gpus():
        _check(device_ids or [])
        return DistributedDataParallel(model), True
    ids = list(range(count_visible_gpus())) if device_ids is None else device_ids
    _check(ids)
    device = torch.device("cuda", ids[local % len(ids)])
    torch.cuda.set_device(device)
    return DistributedDataParallel(model.to(device), device_ids=[device]), True


def setup_multi_gpu_training(
    model: nn.Module,
    strategy: str | TrainingMode = "auto",
    device_ids: list[int] | None = None,
    ddp_backend: str | None = None,
    ddp_init_method: str = "env://",
) -> tuple[nn.Module, bool, dict[str, Any]]:
    """The model wrapped as asked, whether it is, and `get_gpu_info()`.

    `auto` takes DistributedDataParallel where a launcher or a process group is there, and else leaves the model as it
    is. It never takes DataParallel, which PyTorch advises against.

    Raises:
        RequestError: there is no such strategy, or GPUs are not there.
    """
    mode = TrainingMode.named(strategy)
    if mode is TrainingMode.DATA_PARALLEL:
        model, ok = setup_data_parallel(model, device_ids)
    elif mode is TrainingMode.SINGLE_GPU:
        ok = False
    else:
        model, ok = setup_distributed_data_parallel(model, ddp_backend, ddp_init_method, device_ids=device_ids)
    return model, ok, get_gpu_info()


def _check(ids: list[int]) -> None:
    gpus = count_visible_gpus()
    if absent := [number for number in ids if not 0 <= number < gpus]:
        seen = f"{gpus} are visible" if gpus else "no GPU is visible"
        raise RequestError(f"device_ids {ids}: there is no GPU {', '.join(map(str, absent))} ({seen})")
