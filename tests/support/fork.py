"""A process of its own for something deadly: forked from the running test, since torch is imported already."""

import os
import select
import traceback
from collections.abc import Callable

from tests.support import safe_forks  # noqa: F401


def exit_code(work: Callable[[], object]) -> int:
    """How a forked process ends that does `work`: 0, 1 for an error, or minus the signal that killed it."""
    process = os.fork()
    if process == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)  # also where nothing can be printed: a fork that returned would run the other tests too
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def wait_for_end(read: int, seconds: float = 10) -> None:
    """Wait until the last process that holds the other end of a pipe is gone, and has written no more."""
    assert select.select([read], [], [], seconds)[0], "a process still holds the pipe"
    assert os.read(read, 1) == b""
