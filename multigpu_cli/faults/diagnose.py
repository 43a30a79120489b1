"""What an error of somebody else's means: whether it only follows from another rank's end, and the way out."""

import re
from collections.abc import Sequence

_LOST = ("closed by peer", "reset by peer", "timeout caused pair closure", "remote process has terminated")
_OF_THE_GROUP = {"DistBackendError", "DistNetworkError", "DistStoreError"}

_REMEDIES = (
    (
        r"out of memory|_alloc(ation)?_failed",
        "a smaller --batch-size (--global-batch-size keeps the global batch), --amp bf16",
    ),
    (r"address already in use", "another job holds the port: torchrun --standalone, or another --master-port"),
    (r"bus error|shared memory|/dev/shm", "/dev/shm is too small: docker run --shm-size=8g, or --num-workers 0"),
    (r"did not receive grad|finished reduction in the prior iteration", "--find-unused-parameters, or --freeze them"),
    (r"peer access|p2p|nccl.*(unhandled|system|internal) error", "NCCL_P2P_DISABLE=1 torchrun … (no peer access?)"),
    (r"no space left|disk quota", "make room on that disk, then the same command again: it goes on where it was"),
    (r"too many open files", "ulimit -n 65536, or fewer --num-workers"),
    (r"dataloader worker.*(killed|exited)", "--num-workers 0 shows the loader's own error"),
    (r"device-side assert", "CUDA_LAUNCH_BLOCKING=1 shows where; labels out of range are the usual reason"),
)


def is_consequence(error: BaseException) -> bool:
    """Whether a rank failed only because another one had gone: its message would hide the one that matters."""
    names = {kind.__name__ for kind in type(error).__mro__}
    text = str(error).lower()
    return bool(names & _OF_THE_GROUP) or any(word in text for word in _LOST)


def remedy_for(error: BaseException) -> str:
    """The way out of a known failure, or ''."""
    text = f"{type(error).__name__}: {error}".lower()
    return next((remedy for pattern, remedy in _REMEDIES if re.search(pattern, text, re.DOTALL)), "")


def find_unused_parameters(error: BaseException, trained: Sequence[str]) -> list[str]:
    """The parameters that DDP's complaint lists by index only.

    Args:
        trained: names of the parameters that take a gradient, in order.
    """
    found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
    return [trained[int(index)] for index in found[1].split() if int(index) < len(trained)] if found else []
