"""How far a run is: a bar on a terminal that costs a step next to nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


class Progress:
    """Shows nothing; the base of what does.

    Attributes:
        total: planned optimizer steps.
    """

    def __init__(self, total_steps: int) -> None:
        self.total = total_steps

    def update(self, step: int, loss: float | None = None, rate: float | None = None) -> None:
        """So many steps are done; loss and samples per second where they are known on the host."""

    def close(self) -> None:
        """Take the bar off the screen."""

    @contextmanager
    def out_of_the_way(self) -> Iterator[None]:
        """Text may be written inside."""
        yield


class Bar(Progress):
    """A tqdm bar: steps, time left, loss and samples per second, redrawn at most five times a second."""

    def __init__(self, total_steps: int, initial: int, stream: TextIO) -> None:
        super().__init__(total_steps)
        from threading import RLock

        from tqdm import tqdm

        class Quiet(tqdm):
            monitor_interval = 0  # no thread of its own

        Quiet.set_lock(RLock())  # tqdm's default makes a semaphore for bars in several processes
        self._bar = Quiet(
            total=total_steps,
            initial=initial,
            file=stream,
            mininterval=0.2,
            dynamic_ncols=True,
            leave=False,
            bar_format="{percentage:3.0f}% |{bar}| step {n_fmt}/{total_fmt} {elapsed}<{remaining}{postfix}",
        )

    def update(self, step: int, loss: float | None = None, rate: float | None = None) -> None:
        known = [f"loss {loss:.4f}"] if loss is not None else []
        known += [f"{rate:,.0f} samples/s"] if rate is not None else []
        if known:
            self._bar.set_postfix_str(", ".join(known), refresh=False)
        self._bar.update(step - self._bar.n)

    def close(self) -> None:
        self._bar.close()

    @contextmanager
    def out_of_the_way(self) -> Iterator[None]:
        self._bar.clear()
        try:
            yield
        finally:
            self._bar.refresh()
