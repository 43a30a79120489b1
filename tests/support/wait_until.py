"""Waits for what other processes do."""

import time
from collections.abc import Callable


def wait_until(holds: Callable[[], bool], what: str, *, seconds: float = 60, every: float = 0.02) -> None:
    """Ask now and then whether something holds.

    Args:
        what: is expected, for the message.
        every: seconds between two questions.

    Raises:
        AssertionError: it does not, after so many seconds.
    """
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, what
        time.sleep(every)
