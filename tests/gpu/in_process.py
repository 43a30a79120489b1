"""The engine in this process, on devices that the command line would not choose, or watched from within."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from multigpu_cli import engine
from multigpu_cli.config.sources import resolve
from multigpu_cli.distributed.launch_env import LaunchEnv
from multigpu_cli.distributed.placement import Placement
from multigpu_cli.monitor.console import Console
from multigpu_cli.run.open import resolve_request
from multigpu_cli.run.request.spec import FromConfig

GPU = torch.device("cuda", 0)
ONE = Placement("single", (GPU,), 0, "one GPU")
ONE_RANK = Placement("ddp", (GPU,), 0, "one rank")
ONE_SHARD = Placement("fsdp", (GPU,), 0, "one rank")


def train(folder: Path, choice: Placement = ONE, sets: tuple[str, ...] = (), **flags: str) -> dict[str, Any]:
    """Carry out one run; returns its summary.

    Args:
        choice: where; ddp and fsdp are a world of one rank.
        flags: by their keys in YAML.
    """
    launch_env = alone() if choice.strategy in ("ddp", "fsdp") else None
    config = resolve({"save_dir": str(folder), **flags}, list(sets), None)
    with resolve_request(config, choice, launch_env, Console("silent"), raise_again, FromConfig()) as request:
        return engine.run(request)


@contextmanager
def count_gathers() -> Iterator[list[int]]:
    """The bytes of each weight that FSDP gathers within."""
    seen: list[int] = []
    real = FSDPParam.init_unsharded_param

    def count(self: FSDPParam) -> None:
        seen.append(sum(output.nbytes for output in self.all_gather_outputs))
        real(self)

    with patch.object(FSDPParam, "init_unsharded_param", count):
        yield seen


def alone() -> LaunchEnv:
    """A world of one rank, which keeps the store itself."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    return LaunchEnv(0, 1, 0, 1, "localhost", port, attempt=0, agent_store=False)


def raise_again(error: Exception) -> None:
    raise error


def check_device(summary: dict[str, Any], strategy: str, precision: str) -> None:
    """The run took place as asked for.

    Raises:
        AssertionError: it did not.
    """
    expected = ("completed", strategy, precision, torch.cuda.get_device_name(0))
    found = tuple(summary[name] for name in ("status", "strategy", "precision", "device"))
    assert found == expected, f"{found} instead of {expected}"
