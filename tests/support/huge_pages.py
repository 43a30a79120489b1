"""Fewer, larger pages for this process, whose forks are then several times cheaper."""

import ctypes
import re
from pathlib import Path

_ANONYMOUS = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0 *(?:\[heap\])?$", re.MULTILINE)
_COLLAPSE, _PAGE = 25, 2**21  # MADV_COLLAPSE, since Linux 6.1


def collapse_pages() -> int:
    """Put this process's own memory into pages of 2 MiB, where the kernel can; returns how many MiB it did.

    A fork copies the table of pages: for 0.5 GiB in pages of 4 KiB that takes 18 ms here, and the child as long again
    when it ends.
    """
    done, libc, maps = 0, ctypes.CDLL(None), Path("/proc/self/maps")
    for begin, end in _ANONYMOUS.findall(maps.read_text()) if maps.exists() else ():
        first, last = -(-int(begin, 16) // _PAGE) * _PAGE, int(end, 16) // _PAGE * _PAGE
        if last > first and not libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _COLLAPSE):
            done += (last - first) // 2**20
    return done
