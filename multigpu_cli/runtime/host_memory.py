"""How the C library gives back the memory of freed tensors."""

import ctypes
import sys

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
