"""`World`: rank, world size and device of this process; errors of that device's memory, and of the host's."""

import ctypes
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from multigpu_cli.distributed.launch_env import PreviousAttempt

if TYPE_CHECKING:
    from multigpu_cli.distributed.rendezvous import RankGpu


@dataclass(frozen=True)
class World:
    """Rank, world size and device of this process, and what the handshake agreed on."""

    device: torch.device
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    attempt: int = 0  # how often the job was started before, agreed by all ranks
    store: dist.PrefixStore | None = field(default=None, compare=False)  # the launcher's, prefixed by attempt
    hosts: tuple[str, ...] = field(default=(), compare=False)  # the name of each rank's machine
    agent_ids: tuple[str, ...] = field(default=(), compare=False)  # the unique name of each rank's launcher agent
    restarts_left: int = field(default=0, compare=False)  # how often the launcher would still restart the workers
    previous_attempt: PreviousAttempt | None = field(default=None, compare=False)  # if its end was recorded
    agent_dir: Path | None = field(default=None, compare=False)  # the folder for such records
    store_prefix: str = field(default="", compare=False)  # the prefix of this attempt's keys in the store
    gpus: "tuple[RankGpu | None, ...]" = field(default=(), compare=False)  # the GPU of each rank

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints to the terminal."""
        return self.rank == 0


_MESSAGES = re.compile(r"_STATUS_(INTERNAL_ERROR_(DEVICE|HOST)_)?ALLOC(ATION)?_FAILED|CUDA error: out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means out of memory: torch's allocator has an error type, CUDA libraries only have a message.

    cuBLAS, cuDNN and other libraries allocate memory themselves, and so does CUDA for kernels and graphs.
    """
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _MESSAGES.search(str(error)) is not None
    )


def free_memory(device: torch.device) -> None:
    """Release cached memory after a pass that did not fit, and reset the peak, which is not that of the run."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


_MMAP_THRESHOLD = -3  # glibc's M_MMAP_THRESHOLD
_BYTES = 4 * 2**20


def return_freed_tensors() -> None:
    """Have tensors of 4 MiB and more given back to the system once they are freed, where this is glibc.

    By default it raises that limit with each such tensor, up to 32 MiB, and keeps what is below it: a process that
    gathers and frees weights all the time then holds several times what its tensors take.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):  # musl has none
        library.mallopt(_MMAP_THRESHOLD, _BYTES)
