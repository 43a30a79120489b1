"""Starts a run of the Python API: in this process as the rank that it is, or in worker processes."""

import gc
import sys
from copy import deepcopy
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist

from multigpu_cli import engine
from multigpu_cli.api.settings import MultiGPUConfig, to_python_error
from multigpu_cli.capabilities import BEFORE_LAUNCH, load_given
from multigpu_cli.checkpoint.run_folder import resolve_folder
from multigpu_cli.config.schema import Config
from multigpu_cli.errors import RequestError, TrainingError
from multigpu_cli.launch import run_in_workers
from multigpu_cli.monitor.console import Console
from multigpu_cli.run.user_objects import UserObjects
from multigpu_cli.runtime.choose_strategy_and_devices import (
    Placement,
    check_gpus_exist,
    choose_placement,
    count_cores,
    count_visible_gpus,
)
from multigpu_cli.runtime.launch_env import LaunchEnv, refuse_srun_copies
from multigpu_cli.runtime.world import World


def find_launch_env(config: MultiGPUConfig) -> LaunchEnv | None:
    """Rank and world size of this process: from torchrun, an existing process group, or the config.

    Raises:
        RequestError: the config contradicts the launcher, or names a rank without MASTER_ADDR and MASTER_PORT; or srun
            started several processes without one.
    """
    launch_env = LaunchEnv.current()
    if launch_env is None and dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        local = rank if config.local_rank is None else config.local_rank
        launch_env = LaunchEnv(rank, size, local, size, "", 0, attempt=0, agent_store=False)
    if launch_env is None and config.rank is not None and (config.world_size or 1) > 1:
        launch_env = LaunchEnv.for_existing_group(config.rank, config.world_size or 1, config.local_rank)
    if launch_env is None:
        refuse_srun_copies()
        return None
    facts = {"world_size": launch_env.size, "rank": launch_env.rank, "local_rank": launch_env.local_rank}
    for name, fact in facts.items():
        if getattr(config, name) not in (None, fact):
            raise RequestError(
                f"{name}={getattr(config, name)}, but the launcher says {fact}",
                remedy=f"leave {name} out: it is read from the environment",
            )
    return launch_env


def resolve_placement(config: MultiGPUConfig, frozen: Config, launch_env: LaunchEnv | None) -> Placement:
    """Choose strategy and devices.

    Raises:
        RequestError: a device does not exist, or does not support the backend.
    """
    device, gpus = frozen.device, count_visible_gpus()
    if launch_env is None and config.rank is None and (config.world_size or 1) > 1:
        device = replace(device, nproc_per_node=config.world_size)
    try:
        placement = choose_placement(
            replace(device, gpu_ids=None) if launch_env else device,
            gpus=gpus,
            cpus=count_cores(),
            launch_env=launch_env,
        )
    except RequestError as error:
        raise to_python_error(error) from error
    ids = config.device_ids
    if launch_env and ids:
        check_gpus_exist("device_ids", ids, gpus)
        if gpus > 1 and launch_env.local_rank >= len(ids):
            raise RequestError(f"device_ids {ids}: {launch_env.local_size} processes here need as many GPUs")
        placement = placement._replace(devices=(torch.device("cuda", ids[launch_env.local_rank] if gpus > 1 else 0),))
    if config.backend == "nccl" and placement.devices[0].type == "cpu":
        raise RequestError("backend='nccl' needs GPUs, and none is visible", remedy="leave backend out: gloo on CPU")
    seconds = config.timeout.total_seconds() if config.timeout else None
    return placement._replace(backend=config.backend, timeout=seconds)


def run_here(
    config: Config, placement: Placement, launch_env: LaunchEnv | None, user_objects: UserObjects, screen: str
) -> dict[str, Any]:
    """The engine's `run` in this process; returns the summary."""
    try:
        return engine.run(
            config,
            placement,
            launch_env,
            open_console(screen, launch_env),
            on_fatal_error=print_last_error,
            user_objects=user_objects,
        )
    except RequestError as error:
        raise to_python_error(error) from error
    finally:
        if launch_env:
            gc.collect()  # ends gloo's threads, which a cycle keeps: at Python's exit they now and then abort


def run_in_processes(config: Config, placement: Placement, user_objects: UserObjects, screen: str) -> dict[str, Any]:
    """Run in `placement.launch` processes of this machine, on copies of the objects; the model gets their weights.

    Raises:
        RequestError: an object can't be pickled for another process.
    """
    for check in load_given(BEFORE_LAUNCH, config):
        check(config)
    config = resolve_folder(config)
    try:
        ForkingPickler.dumps(user_objects)
    except Exception as error:  # the user's own classes raise anything: reported as what is wrong with the request
        raise RequestError(
            f"{placement.reason}: model, data, loss or optimizer can't be sent to other processes ({error})",
            remedy="torchrun --nproc_per_node=N SCRIPT, where each process makes its own; or classes and functions at "
            "the top of a module, no lambdas",
        ) from error
    answers = run_in_workers(
        placement,
        _worker,
        config,
        placement.backend,
        placement.timeout,
        user_objects,
        screen,
        max_restarts=config.fault.max_restarts,
    )
    summary, problem, remedy = answers[0]
    if problem:
        raise to_python_error(RequestError(problem, remedy=remedy))
    if summary["status"] == "completed":
        user_objects.load_weights(summary["save_dir"], World(torch.device("cpu")))
    return dict(summary)


def _worker(
    config: Config, backend: str | None, timeout: float | None, user_objects: UserObjects, screen: str
) -> tuple[dict[str, Any], str, str]:
    """One worker process: returns the summary, or problem and remedy of a RequestError, which every rank raises."""
    launch_env = LaunchEnv.current()
    placement = choose_placement(config.device, gpus=count_visible_gpus(), cpus=count_cores(), launch_env=launch_env)
    for tensor in [*user_objects.model.parameters(), *user_objects.model.buffers()]:
        tensor.data = tensor.data.clone()  # it arrived in memory that all processes share
    if user_objects.optimizer:
        user_objects.optimizer.load_state_dict(deepcopy(user_objects.optimizer.state_dict()))
    try:
        placement = placement._replace(backend=backend, timeout=timeout)
        return run_here(config, placement, launch_env, user_objects, screen), "", ""
    except RequestError as error:
        return {}, error.problem, error.remedy


def open_console(screen: str, launch_env: LaunchEnv | None) -> Console:
    """A console that prints on rank 0 only."""
    return Console("silent" if launch_env and launch_env.rank else screen)  # type: ignore[arg-type]


def print_last_error(error: TrainingError) -> None:
    """Print the error of a process that ends where no exception can be raised any more."""
    Console("quiet", sys.stderr).error(f"error: {error}")
