"""Recognizes out-of-memory errors, and frees cached memory after one."""

import re

import torch

_SAID = re.compile(r"_STATUS_(INTERNAL_ERROR_(DEVICE|HOST)_)?ALLOC(ATION)?_FAILED|CUDA error: out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory did not suffice: torch's own allocator says so by its kind, libraries of CUDA by their words.

    cuBLAS, cuDNN and their like allocate beside torch, and so does CUDA itself for kernels and graphs.
    """
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _SAID.search(str(error)) is not None
    )


def free_memory(device: torch.device) -> None:
    """After a pass that did not fit: give back what it has taken, and forget its peak, which is not that of the run."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
