"""How far a run is: a bar on a terminal that costs a step next to nothing."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

_NARROWEST = 3  # columns of the bar itself


class ProgressDisplay:
    """Shows nothing; the base of what does.

    Attributes:
        total: planned optimizer steps.
    """

    def __init__(self, total_steps: int) -> None:
        self.total = total_steps

    def update(self, step: int, facts: Sequence[str] = ()) -> None:
        """So many steps are done; facts to show beside it, where there are new ones, the most important first."""

    def close(self) -> None:
        """Take the bar off the screen."""

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Text may be written inside."""
        yield


class TqdmDisplay(ProgressDisplay):
    """A tqdm bar: steps, time left, and as many facts as fit, redrawn at most five times a second."""

    def __init__(self, total_steps: int, initial: int, stream: TextIO) -> None:
        super().__init__(total_steps)
        from threading import RLock

        from tqdm import tqdm

        class Quiet(tqdm):  # type: ignore[type-arg]  # generic in its stubs alone
            monitor_interval = 0  # no thread of its own

        Quiet.set_lock(RLock())  # tqdm's default makes a semaphore for bars in several processes
        self._bar = Quiet(
            total=total_steps,
            initial=initial,
            file=stream,
            mininterval=0.2,
            dynamic_ncols=True,
            leave=False,
            bar_format="|{bar}| step {n_fmt}/{total_fmt}, {remaining} left{postfix}",
        )

    def update(self, step: int, facts: Sequence[str] = ()) -> None:
        if facts:
            known, room = list(facts), self._columns() - len(f"|{'#' * _NARROWEST}| step , 0:00:00 left")
            room -= 2 * len(str(self.total))
            while known and len(", ".join(known)) + 2 > room:
                known.pop()
            self._bar.set_postfix_str(", ".join(known), refresh=False)
        self._bar.update(step - self._bar.n)

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._bar.fp.fileno()).columns
        except (OSError, ValueError):  # no terminal of the system's
            return sys.maxsize

    def close(self) -> None:
        self._bar.close()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        self._bar.clear()
        try:
            yield
        finally:
            self._bar.refresh()
