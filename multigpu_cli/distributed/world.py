"""`World`: rank, world size and device of this process."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from multigpu_cli.distributed import attempts

if TYPE_CHECKING:
    from multigpu_cli.distributed.rendezvous import RankGpu


@dataclass(frozen=True)
class World:
    """Rank, world size and device of this process, and what the handshake agreed on.

    Attributes:
        attempt: how often the job was started before, agreed by all ranks.
        store: the launcher's key-value store, with a prefix per attempt; None in a world of size 1.
        hosts: the name of each rank's machine.
        agent_ids: the unique name of each rank's launcher agent.
        restarts_left: how often the launcher would still restart the workers.
        previous_attempt: how the attempt before this one ended, if it is recorded.
        agent_dir: the folder for such records.
        store_prefix: the prefix of this attempt's keys in the store.
        gpus: the GPU of each rank.
    """

    device: torch.device
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    attempt: int = 0
    store: dist.PrefixStore | None = field(default=None, compare=False)
    hosts: tuple[str, ...] = field(default=(), compare=False)
    agent_ids: tuple[str, ...] = field(default=(), compare=False)
    restarts_left: int = field(default=0, compare=False)
    previous_attempt: attempts.PreviousAttempt | None = field(default=None, compare=False)
    agent_dir: Path | None = field(default=None, compare=False)
    store_prefix: str = field(default="", compare=False)
    gpus: "tuple[RankGpu | None, ...]" = field(default=(), compare=False)

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints to the terminal."""
        return self.rank == 0
