"""The trainer module: `train(config)` chooses where to run and returns the summary; the Python API is imported here.

from multigpu_cli.config.schema import Config
from train_multi_gpu import train

summary = train(Config())          # scikit-learn's digits, on what this machine has

The names of the API, `train_with_multi_gpu` and the others in API, load when they are first asked for.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from multigpu_cli import engine
from multigpu_cli.commands import explained
from multigpu_cli.config.schema import Config
from multigpu_cli.errors import TrainingError
from multigpu_cli.monitor.console import Console, reserved_stdout
from multigpu_cli.runtime import elastic
from multigpu_cli.runtime.devices import choose, cores, visible_gpus
from multigpu_cli.runtime.world import Rendezvous

if TYPE_CHECKING:
    from multigpu_cli.api.gpus import cleanup_distributed as cleanup_distributed
    from multigpu_cli.api.gpus import clear_gpu_memory as clear_gpu_memory
    from multigpu_cli.api.gpus import get_gpu_info as get_gpu_info
    from multigpu_cli.api.gpus import print_gpu_info as print_gpu_info
    from multigpu_cli.api.settings import MultiGPUConfig as MultiGPUConfig
    from multigpu_cli.api.settings import TrainingMode as TrainingMode
    from multigpu_cli.api.training import evaluate_with_multi_gpu as evaluate_with_multi_gpu
    from multigpu_cli.api.training import train_with_multi_gpu as train_with_multi_gpu

API = {
    "gpus": ("get_gpu_info", "print_gpu_info", "clear_gpu_memory", "cleanup_distributed"),
    "managing": ("MultiGPUTrainingManager",),
    "metrics": ("MetricsCollector", "PerformanceMonitor"),
    "recovery": ("FaultToleranceManager",),
    "settings": ("MultiGPUConfig", "TrainingMode"),
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
        screen: quiet, normal, verbose, or json (the summary is then the only thing on stdout).
        dry_run: stop after the plan, and return it.

    Returns:
        The summary, as in summary.json; `status` is completed or stopped.

    Raises:
        RequestError: the request is wrong; nothing was written.
        TrainingError: the training failed; the run folder says how far it came.
    """
    meeting = Rendezvous.from_environment(os.environ)
    choice = choose(config.device, gpus=visible_gpus(), cpus=cores(), meeting=meeting)
    if choice.launch and not dry_run:
        from multigpu_cli.launch import self_launch  # late: the elastic agent is needed here only

        return self_launch(config, choice, screen)
    level = "silent" if meeting and meeting.rank else "normal" if screen == "json" else screen
    stream = reserved_stdout() if screen == "json" else None
    console = Console(level, stream, json=screen == "json")  # type: ignore[arg-type]
    return engine.run(config, choice, meeting, console, last_words=_last_words, dry_run=dry_run)


def _last_words(error: TrainingError) -> None:
    """For a process that ends where no exception can be raised any more."""
    message = explained.foreseen(error)
    again = "" if error.consequence else elastic.note_failure(os.environ, message.splitlines()[0], error.failed_at)
    elastic.write_error(os.environ, message)
    Console("quiet", sys.stderr).error("\n".join(filter(None, [message, again])))
