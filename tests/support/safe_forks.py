"""Makes every fork of the process that imports this safe, beside torch's threads and those of tests.

What the parent has left to be collected may own threads, which are not in the fork and cannot be joined there. A thread
of the parent's that looks up a name, as a TCPStore's does for each connection, holds a lock of the C library's: a fork
would find that locked for ever.
"""

import gc
import os
import socket

_collects: list[bool] = []


def _prepare() -> None:
    _collects.append(gc.isenabled())
    gc.disable()  # other modules' functions come before `_leave_to_parent`
    socket.getaddrinfo("localhost", None)  # waits for that lock


def _go_on() -> None:
    if _collects.pop():
        gc.enable()


def _leave_to_parent() -> None:
    gc.freeze()
    _go_on()


os.register_at_fork(before=_prepare, after_in_parent=_go_on, after_in_child=_leave_to_parent)
