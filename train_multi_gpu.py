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
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    raise ImportError("this program needs Linux, not Windows itself: try WSL, which is Linux (wsl --install)")

import torch

from multigpu_cli import engine
from multigpu_cli.config.resume_rules import replace_settings
from multigpu_cli.config.schema import Config
from multigpu_cli.distributed.launch_env import (
    LaunchEnv,
    has_redirected_logs,
    is_told_by_launcher,
    prepare_cublas,
    record_failure,
    refuse_srun_copies,
    write_error,
)
from multigpu_cli.distributed.placement import Placement, choose_placement, count_cores, count_visible_gpus
from multigpu_cli.distributed.processes import RankOutput
from multigpu_cli.errors import RequestError, TrainingError
from multigpu_cli.faults.explain import describe_error
from multigpu_cli.monitor.console import Console, reserve_stdout
from multigpu_cli.monitor.gpu import explain_unseen_gpus
from multigpu_cli.run.open import resolve_request, try_request
from multigpu_cli.run.request.spec import FromConfig

prepare_cublas()  # for a run with --exact, before the first product of a script that imports this

if TYPE_CHECKING:
    from multigpu_cli.api.public import *  # noqa: F403 - every name of that file is public


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return ["train", *_import_public_names()]
    if name == "__version__":
        return version("multigpu-cli")
    if not name.startswith("_") and name in (public := _import_public_names()):
        return public[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_import_public_names()])


def _import_public_names() -> dict[str, Any]:
    """The names of the Python API; imported late, since training from the command line needs none of them."""
    public = vars(import_module("multigpu_cli.api.public"))
    return {name: value for name, value in public.items() if not name.startswith("_")}


def train(config: Config, *, screen: str = "normal", dry_run: bool = False) -> dict[str, Any]:
    """Train as the config says: as a worker of torchrun, self-launched on several GPUs, or in this process.

    Args:
        config: as the command line builds it from its flags: `Config()`, or
            `multigpu_cli.config.sources.resolve({"data": "digits", "epochs": 2}, ["model.args.width=64"], None)`.
        screen: quiet, normal, verbose, or json (the summary is then the only thing on stdout).
        dry_run: build the model, try a batch as the run would, and return the plan; nothing is written.

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
    if dry_run:
        config = replace_settings(config, {"mirror": None})  # a start would copy a checkpoint from there
    refuse_srun_copies()
    launch_env = LaunchEnv.from_environment(os.environ)
    placement = choose_placement(config.device, gpus=count_visible_gpus(), cpus=count_cores(), launch_env=launch_env)
    if placement.num_processes_to_launch and not dry_run:
        from multigpu_cli.launch import self_launch  # late: the elastic agent is needed here only

        return self_launch(config, placement, screen)
    level = "silent" if launch_env and launch_env.rank else "normal" if screen == "json" else screen
    stream = reserve_stdout() if screen == "json" else None
    with ExitStack() as stack:
        redirected = launch_env is not None and launch_env.rank > 0 and not has_redirected_logs(os.environ)
        rank_output = stack.enter_context(RankOutput(launch_env.rank)) if launch_env and redirected else None
        console = Console(level, stream, json=screen == "json", rank_output=rank_output)  # type: ignore[arg-type]
        if warning := _explain_unseen_gpus(placement, os.environ):
            console.warn(warning)
        on_fatal_error = partial(_print_last_error, rank_output)
        opening = resolve_request(config, placement, launch_env, console, on_fatal_error, FromConfig())
        request = stack.enter_context(opening)
        return try_request(request) if dry_run else engine.run(request)


def _explain_unseen_gpus(placement: Placement, environ: Mapping[str, str]) -> str:
    """Why training is on CPU, if torch is built for CUDA and the machine has GPUs that are not hidden."""
    hidden = environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles")  # the last is SLURM's
    if placement.devices[0].type != "cpu" or hidden or not torch.version.cuda:
        return ""
    return explain_unseen_gpus(torch.version.cuda)


def _print_last_error(rank_output: RankOutput | None, error: TrainingError) -> None:
    """Report the error of a process in which no exception can be raised any more."""
    if rank_output:
        rank_output.stop()
    message = describe_error(error)
    again = "" if error.caused_by_peer else record_failure(os.environ, message.splitlines()[0], error.failed_at)
    write_error(os.environ, error.exit_code, message)
    if not is_told_by_launcher(error, os.environ):
        Console("quiet", sys.stderr).error("\n".join(filter(None, [message, again])))
