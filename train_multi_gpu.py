"""The trainer module: `train(config)` chooses where to run and returns the summary; the Python API is imported here.

from multigpu_cli.config.schema import Config
from train_multi_gpu import train

summary = train(Config())          # scikit-learn's digits, on what this machine has

The names of the API, `train_with_multi_gpu` and the others in API, are imported on first use.
"""

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from multigpu_cli import engine
from multigpu_cli.commands import errors_text
from multigpu_cli.config.schema import Config
from multigpu_cli.errors import RequestError, TrainingError
from multigpu_cli.monitor.console import Console, reserve_stdout
from multigpu_cli.runtime import restart_records
from multigpu_cli.runtime.placement import Placement, choose_placement, count_cores, count_visible_gpus
from multigpu_cli.runtime.rank_output import RankOutput
from multigpu_cli.runtime.world import LaunchEnv

if TYPE_CHECKING:
    from multigpu_cli.api.fault_tolerance import FaultToleranceManager as FaultToleranceManager
    from multigpu_cli.api.functions import cleanup_distributed as cleanup_distributed
    from multigpu_cli.api.functions import get_multi_gpu_metrics as get_multi_gpu_metrics
    from multigpu_cli.api.functions import get_multi_gpu_status as get_multi_gpu_status
    from multigpu_cli.api.functions import log_training_metrics as log_training_metrics
    from multigpu_cli.api.functions import setup_data_parallel as setup_data_parallel
    from multigpu_cli.api.functions import setup_distributed_data_parallel as setup_distributed_data_parallel
    from multigpu_cli.api.functions import setup_multi_gpu_training as setup_multi_gpu_training
    from multigpu_cli.api.gpu_info import clear_gpu_memory as clear_gpu_memory
    from multigpu_cli.api.gpu_info import get_gpu_info as get_gpu_info
    from multigpu_cli.api.gpu_info import print_gpu_info as print_gpu_info
    from multigpu_cli.api.manager import MultiGPUTrainingManager as MultiGPUTrainingManager
    from multigpu_cli.api.metrics import MetricsCollector as MetricsCollector
    from multigpu_cli.api.metrics import PerformanceMonitor as PerformanceMonitor
    from multigpu_cli.api.scaling import estimate_training_speedup as estimate_training_speedup
    from multigpu_cli.api.scaling import launch_distributed_training as launch_distributed_training
    from multigpu_cli.api.scaling import optimize_batch_size_for_multi_gpu as optimize_batch_size_for_multi_gpu
    from multigpu_cli.api.scaling import print_training_speedup_estimates as print_training_speedup_estimates
    from multigpu_cli.api.settings import MultiGPUConfig as MultiGPUConfig
    from multigpu_cli.api.settings import TrainingMode as TrainingMode
    from multigpu_cli.api.trainers import DataParallelTrainer as DataParallelTrainer
    from multigpu_cli.api.trainers import DistributedDataParallelTrainer as DistributedDataParallelTrainer
    from multigpu_cli.api.trainers import MultiGPUTrainer as MultiGPUTrainer
    from multigpu_cli.api.training import evaluate_with_multi_gpu as evaluate_with_multi_gpu
    from multigpu_cli.api.training import train_with_multi_gpu as train_with_multi_gpu

API = {
    "functions": (
        "setup_multi_gpu_training",
        "setup_data_parallel",
        "setup_distributed_data_parallel",
        "get_multi_gpu_status",
        "get_multi_gpu_metrics",
        "log_training_metrics",
        "cleanup_distributed",
    ),
    "gpu_info": ("get_gpu_info", "print_gpu_info", "clear_gpu_memory"),
    "manager": ("MultiGPUTrainingManager",),
    "metrics": ("MetricsCollector", "PerformanceMonitor"),
    "fault_tolerance": ("FaultToleranceManager",),
    "settings": ("MultiGPUConfig", "TrainingMode"),
    "scaling": (
        "optimize_batch_size_for_multi_gpu",
        "launch_distributed_training",
        "estimate_training_speedup",
        "print_training_speedup_estimates",
    ),
    "trainers": ("MultiGPUTrainer", "DataParallelTrainer", "DistributedDataParallelTrainer"),
    "training": ("train_with_multi_gpu", "evaluate_with_multi_gpu"),
}
"""Names of the Python API by the file of multigpu_cli/api that holds them."""


def __getattr__(name: str) -> Any:
    for file, names in API.items():
        if name in names:
            return getattr(import_module(f"multigpu_cli.api.{file}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *(name for names in API.values() for name in names)])


def train(config: Config, *, screen: str = "normal", dry_run: bool = False) -> dict[str, Any]:
    """Train as the config says: as a worker of torchrun, self-launched on several GPUs, or in this process.

    Args:
        config: as the command line builds it from its flags: `Config()`, or
            `multigpu_cli.config.sources.resolve({"data": "digits", "epochs": 2}, ["model.args.width=64"], None)`.
        screen: quiet, normal, verbose, or json (the summary is then the only thing on stdout).
        dry_run: stop after the plan, and return it.

    Returns:
        The summary, as in summary.json; `status` is completed or stopped.

    Raises:
        RequestError: the request is wrong; nothing was written.
        TrainingError: the training failed; the run folder says how far it came.
    """
    if not isinstance(config, Config):
        raise RequestError(
            f"train: a {type(config).__name__} is not a Config", remedy="train_with_multi_gpu for a model of your own"
        )
    launch_env = LaunchEnv.from_environment(os.environ)
    placement = choose_placement(config.device, gpus=count_visible_gpus(), cpus=count_cores(), launch_env=launch_env)
    if placement.launch and not dry_run:
        from multigpu_cli.launch import self_launch  # late: the elastic agent is needed here only

        return self_launch(config, placement, screen)
    level = "silent" if launch_env and launch_env.rank else "normal" if screen == "json" else screen
    stream = reserve_stdout() if screen == "json" else None
    with ExitStack() as stack:
        redirected = (
            launch_env is not None and launch_env.rank > 0 and not restart_records.has_redirected_logs(os.environ)
        )
        rank_output = stack.enter_context(RankOutput(launch_env.rank)) if launch_env and redirected else None
        console = Console(level, stream, json=screen == "json", rank_output=rank_output)  # type: ignore[arg-type]
        if warning := _explain_unseen_gpus(placement, os.environ):
            console.warn(warning)
        return engine.run(
            config,
            placement,
            launch_env,
            console,
            on_fatal_error=partial(_print_last_error, rank_output),
            dry_run=dry_run,
        )


def _explain_unseen_gpus(placement: Placement, environ: Mapping[str, str]) -> str:
    """Why training is on CPU, if torch is built for CUDA and the machine has GPUs that are not hidden."""
    hidden = environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles")  # the last is SLURM's
    if placement.devices[0].type != "cpu" or hidden or not torch.version.cuda:
        return ""
    from multigpu_cli.monitor.gpu import explain_unseen_gpus  # late: rarely needed

    return explain_unseen_gpus(torch.version.cuda)


def _print_last_error(rank_output: RankOutput | None, error: TrainingError) -> None:
    """Report the error of a process in which no exception can be raised any more."""
    if rank_output:
        rank_output.stop()
    message = errors_text.describe_known_error(error)
    again = (
        ""
        if error.consequence
        else restart_records.record_failure(os.environ, message.splitlines()[0], error.failed_at)
    )
    restart_records.write_error(os.environ, error.exit_code, message)
    Console("quiet", sys.stderr).error("\n".join(filter(None, [message, again])))
