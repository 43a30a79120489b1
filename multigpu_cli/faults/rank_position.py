"""Where a rank is in its run: the step, the phase within the step, and whether it makes progress."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from torch import Tensor

PHASES = (
    "starting",
    "logging",
    "evaluating",
    "agreeing",
    "saving",
    "fetching data",
    "forward",
    "backward",
    "last backward",
    "reduction",
    "optimizer",
)
"""In the order of a step, from the end of the step before: a rank in a later phase waits for those in earlier ones."""


@dataclass(frozen=True)
class RankPosition:
    """The position of a rank, as it is sent to the others.

    Attributes:
        steps: optimizer steps done.
        phase: one of PHASES.
        arrivals: how often it came to where all workers wait for each other, within the phases since the last step.
        line: the innermost line of code outside of Python and installed packages.
    """

    rank: int
    steps: int
    phase: str
    line: str
    arrivals: int = 0

    @property
    def order(self) -> tuple[int, int, int]:
        return self.steps, self.arrivals, PHASES.index(self.phase)

    def __str__(self) -> str:
        return f"{self.phase}, {self.steps} steps done" + (f", at {self.line}" if self.line else "")


class OwnProgress:
    """The position of this rank, updated by the training loop and read by the watchdog's thread.

    Attributes:
        arrivals: see `RankPosition`.
        samples: sample numbers of the present micro-batch.
        moves: how often progress was marked.
        last_move: when it was last marked, in Unix seconds.
        logs: the folder for reports; None before training begins.
    """

    def __init__(self) -> None:
        self.steps, self.phase, self.arrivals = 0, PHASES[0], 0
        self.samples: Tensor | None = None
        self.moves, self.last_move = 0, time.time()
        self.logs: Path | None = None
        self.first_step: int | None = None

    def mark(self) -> None:
        self.moves += 1
        self.last_move = time.time()

    def steps_done(self) -> int | None:
        """Optimizer steps done in the run, or None before the first one of this attempt."""
        return None if self.first_step is None or self.steps == self.first_step else self.steps

    def open_report(self, name: str) -> TextIO:
        """A new file in the folder for reports; before training begins, what is written to it is lost."""
        return open(os.devnull if self.logs is None else self.logs / name, "w")
