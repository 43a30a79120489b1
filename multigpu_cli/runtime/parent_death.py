"""Kills this process when its parent dies, so that no orphan keeps the lock of the run."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when its parent ends (Linux); at once if it has ended already.

    Args:
        parent: its process number, where it is known from before; else one that ends before we ask is not noticed.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid() if parent is None else parent
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
