"""Recognizes out-of-memory errors, frees cached memory after one, and has the host's freed memory given back."""

import ctypes
import re
import sys

import torch

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
