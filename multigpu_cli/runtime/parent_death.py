"""Kills this process when its parent dies, so that no orphan keeps the lock of the run."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends (Linux); exit at once if it has ended already.

    Args:
        parent: the parent's pid, if known; without it, a parent that ended before this call is not noticed.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid() if parent is None else parent
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
