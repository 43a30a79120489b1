"""A process of its own for something deadly: forked from the running test, since torch is imported already."""

import logging
import os
import select
import sys
import traceback
from collections.abc import Callable
from typing import IO

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


def write_output_to(out: IO[str], err: IO[str]) -> None:
    """As a new process begins with these: in a fork torch's loggers still have the stream of the test's imports."""
    for number, file in ((1, out), (2, err)):
        os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = out, err
    for logger in logging.root.manager.loggerDict.values():
        for handler in getattr(logger, "handlers", ()):
            if type(handler) is logging.StreamHandler:  # some of its subclasses have a stream of their own
                handler.stream = err  # and not by setStream, which flushes the old one: it may be closed


def wait_for_end(read: int, seconds: float = 10) -> None:
    """Wait until the last process that holds the other end of a pipe is gone, and has written no more."""
    assert select.select([read], [], [], seconds)[0], "a process still holds the pipe"
    assert os.read(read, 1) == b""
