"""Who we are among the processes of this run: read once from the environment, then a value."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from multigpu_cli.errors import RequestError
from multigpu_cli.runtime.parent import die_with_parent

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Rendezvous:
    """What torchrun (or another launcher of its kind) tells each process.

    Attributes:
        attempt: how often the agent restarted the workers.
        agent_store: the agent hosts the store, so that no rank has to.
        restarts_left: how often the agent would start the workers again if this attempt failed.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    attempt: int
    agent_store: bool
    restarts_left: int = 0

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> "Rendezvous | None":
        """None where no launcher started us.

        Raises:
            RequestError: the variables are there only in part, or are no numbers.
        """
        if "RANK" not in env and "WORLD_SIZE" not in env:
            return None
        if missing := [name for name in _NEEDED if not env.get(name)]:
            raise RequestError(
                f"the environment has RANK or WORLD_SIZE but not {', '.join(missing)}",
                remedy="start with torchrun, which sets them all, or unset RANK and WORLD_SIZE",
            )
        try:
            rank, size, local_rank = (int(env[name]) for name in _NEEDED[:3])
            return cls(
                rank=rank,
                size=size,
                local_rank=local_rank,
                local_size=int(env.get("LOCAL_WORLD_SIZE", size)),
                address=env["MASTER_ADDR"],
                port=int(env["MASTER_PORT"]),
                attempt=int(env.get("TORCHELASTIC_RESTART_COUNT", 0)),
                agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
                restarts_left=int(env.get("TORCHELASTIC_MAX_RESTARTS", 0))
                - int(env.get("TORCHELASTIC_RESTART_COUNT", 0)),
            )
        except ValueError as error:
            raise RequestError(f"RANK, WORLD_SIZE, LOCAL_RANK and MASTER_PORT must be numbers: {error}") from error


@dataclass(frozen=True)
class World:
    """This process among all of them, and the device that it works on.

    Attributes:
        attempt: how often the launcher restarted us.
        store: the launcher's key-value store, in a part of its own for each attempt; None in a world of one.
    """

    device: torch.device
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    attempt: int = 0
    store: dist.PrefixStore | None = field(default=None, compare=False)

    @property
    def main(self) -> bool:
        """Whether this process writes files and speaks to the user."""
        return self.rank == 0


@contextmanager
def joined(
    meeting: Rendezvous | None, device: torch.device, *, timeout: float, backend: str | None = None
) -> Iterator[World]:
    """Form the process group for as long as the context lasts; without a launcher, a world of one.

    Args:
        timeout: seconds after which a collective that lacks a rank fails.
        backend: nccl for CUDA and gloo elsewhere, unless said otherwise (two processes can't share a GPU over nccl).
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if meeting is None:
        yield World(device)
        return
    die_with_parent()
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    dist.init_process_group(
        backend,
        store=_store(meeting, timeout, hosts=not meeting.agent_store and meeting.rank == 0),
        rank=meeting.rank,
        world_size=meeting.size,
        timeout=timedelta(seconds=timeout),
        device_id=device if backend == "nccl" else None,
    )
    try:
        place = (meeting.rank, meeting.size, meeting.local_rank, meeting.local_size, meeting.attempt)
        yield World(device, *place, _store(meeting, timeout, hosts=False))  # a client of its own, for other threads
    finally:
        dist.destroy_process_group()


def _store(meeting: Rendezvous, timeout: float, *, hosts: bool) -> dist.PrefixStore:
    """The agent keeps one store over all restarts: a prefix for each attempt keeps dead processes' addresses out."""
    try:
        store = dist.TCPStore(
            meeting.address,
            meeting.port,
            meeting.size,
            is_master=hosts,
            timeout=timedelta(seconds=max(timeout, 300)),
            wait_for_workers=False,
        )
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise RequestError(
            f"MASTER_PORT={meeting.port} in the environment: another program uses that port",
            remedy="torchrun --standalone, which takes a free one, or another --master-port",
        ) from error
    return dist.PrefixStore(f"attempt-{meeting.attempt}", store)
