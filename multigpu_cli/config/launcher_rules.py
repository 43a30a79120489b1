"""Checks the environment variables of a launcher, and the settings that conflict with them."""

from collections.abc import Iterator, Mapping

from multigpu_cli.config.schema import Config
from multigpu_cli.errors import RequestError

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
OWN_RUN_ID = "multigpu-"
"""The prefix of the run ids of self-launched processes."""


def is_launched(environ: Mapping[str, str]) -> bool:
    """Whether torchrun, or another launcher that sets its variables, started this process."""
    return "RANK" in environ or "WORLD_SIZE" in environ


def is_self_launched(environ: Mapping[str, str]) -> bool:
    """Whether our own launcher started this process; the settings that it passes on have been applied already."""
    return environ.get("TORCHELASTIC_RUN_ID", "").startswith(OWN_RUN_ID)


def find_launcher_errors(config: Config, environ: Mapping[str, str]) -> Iterator[RequestError]:
    """The settings that conflict with the launcher that started this process."""
    if not is_launched(environ) or is_self_launched(environ):
        return
    faults = list(find_environment_errors(environ))
    yield from faults or _find_conflicts(config, environ)


def find_environment_errors(environ: Mapping[str, str]) -> Iterator[RequestError]:
    """Missing or invalid variables, given that a launcher has set some of them."""
    missing = [name for name in _NEEDED if not environ.get(name)]
    if missing:
        present = [name for name in _NEEDED if name not in missing]
        yield RequestError(
            f"the environment of ddp is incomplete: {', '.join(present)} without {', '.join(missing)}",
            remedy=f"start with torchrun, which sets all of them, or unset {' '.join(present)}",
        )
        return
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if not environ.get(name, "0").isdecimal():
            yield RequestError(
                f"{name}={environ[name]} in the environment is not a whole number", remedy="start with torchrun"
            )
            return
    rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    if rank >= size:
        yield RequestError(
            f"RANK={rank} with WORLD_SIZE={size} in the environment: ranks must be from 0 to WORLD_SIZE - 1",
            remedy="start with torchrun",
        )


def _find_conflicts(config: Config, environ: Mapping[str, str]) -> Iterator[RequestError]:
    device, size = config.device, int(environ["WORLD_SIZE"])
    if device.multi_gpu == "dp":
        yield RequestError(
            f"--multi-gpu dp under torchrun: dp uses one process for several GPUs, and torchrun started {size}",
            remedy="use torchrun … --multi-gpu ddp, or python main_multi_gpu.py --multi-gpu dp",
        )
    if device.multi_gpu == "none" and size > 1:
        yield RequestError(
            f"--multi-gpu none under torchrun: {size} processes would each train alone in the same folder",
            remedy="use torchrun … --multi-gpu ddp, or python main_multi_gpu.py --multi-gpu none",
        )
    if device.gpu_ids is not None and device.multi_gpu in ("auto", "ddp", "fsdp"):
        ids = ",".join(map(str, device.gpu_ids))
        yield RequestError(
            f"--gpu-ids {ids} under torchrun: every process uses the GPU of its local rank",
            remedy=f"use CUDA_VISIBLE_DEVICES={ids} torchrun --nproc-per-node={len(device.gpu_ids)} …",
        )
    here = environ.get("LOCAL_WORLD_SIZE")
    if device.nproc_per_node is not None and here and device.nproc_per_node != int(here):
        yield RequestError(
            f"--nproc-per-node {device.nproc_per_node} disagrees with torchrun, which started {here} processes here",
            remedy="leave it out after the script's name: torchrun's own --nproc-per-node decides",
        )
    if config.fault.max_restarts:
        yield RequestError(
            f"--max-restarts {config.fault.max_restarts} under torchrun: torchrun does the restarts",
            remedy=f"use torchrun --max-restarts={config.fault.max_restarts} … before the script's name",
        )
