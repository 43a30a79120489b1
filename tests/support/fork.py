"""A process of its own for something deadly: forked from the running test, since torch is imported already."""

import gc
import os
import traceback
import warnings
from collections.abc import Callable


def exit_code(work: Callable[[], object]) -> int:
    """How a forked process ends that does `work`: 0, 1 for an error, or minus the signal that killed it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 dislikes forks beside torch's threads
        process = os.fork()
    if process == 0:
        gc.freeze()  # as in ranks.py
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
