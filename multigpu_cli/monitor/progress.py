"""The progress of a run: a bar on a terminal, at almost no cost for a step."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

_NARROWEST = 3  # columns of the bar itself


class ProgressDisplay:
    """Shows nothing; the base of displays that do.

    Attributes:
        total: planned optimizer steps.
    """

    def __init__(self, total_steps: int) -> None:
        self.total = total_steps

    def update(self, step: int, facts: Sequence[str] = ()) -> None:
        """Show the number of steps done, and new facts beside it, the most important first."""

    def close(self) -> None:
        """Remove the bar from the screen."""

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Hide the bar, so that text can be written inside."""
        yield


class TqdmDisplay(ProgressDisplay):
    """A tqdm bar: steps, time left, and as many facts as fit, redrawn at most five times a second.

    Args:
        unit: what is counted.
        delay: seconds until it is shown.
    """

    def __init__(
        self, total_steps: int, initial: int, stream: TextIO, *, unit: str = "step", delay: float = 0.0
    ) -> None:
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
            delay=delay,
            bar_format=f"|{{bar}}| {unit} " + "{n_fmt}/{total_fmt}, {remaining} left{postfix}",
        )

    def update(self, step: int, facts: Sequence[str] = ()) -> None:
        if facts:
            room = self._columns() - len(f"|{'#' * _NARROWEST}| step , 0:00:00 left") - 2 * len(str(self.total))
            shown = list(facts)
            while shown and len(", ".join(shown)) + 2 > room:
                shown.pop()
            self._bar.set_postfix_str(", ".join(shown), refresh=False)
        self._bar.update(step - self._bar.n)

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._bar.fp.fileno()).columns
        except (OSError, ValueError):  # the stream is no terminal of the operating system
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
