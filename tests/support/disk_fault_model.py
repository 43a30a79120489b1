"""A network under which the ground gives way.

FAULTS=PASS:DEED[,PASS:DEED…] in the environment: what it does to its run's folder, and at which training passes.
"""

import os
import resource
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor, nn

from tests.support import user_code

_PAUSE = 0.5  # seconds; by then the checkpoint before has been written


def full() -> None:
    """As on a full disk, no file of this process grows any more."""
    time.sleep(_PAUSE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def room() -> None:
    time.sleep(_PAUSE)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def gone() -> None:
    _removed(Path("run"))


def emptied() -> None:
    _removed(Path("run/checkpoints"))


def back() -> None:
    time.sleep(_PAUSE)
    Path("run").mkdir()


def taken() -> None:
    """Somebody removes the run's folder and starts another run there."""
    gone()
    back()
    Path("run/.lock").write_text("1")
    Path("run/journal.jsonl").write_text("")


def _removed(folder: Path) -> None:
    time.sleep(_PAUSE)
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)


DEEDS: dict[str, Callable[[], None]] = {deed.__name__: deed for deed in (full, room, gone, emptied, back, taken)}


class Faulty(nn.Module):
    """Passes its input on, and does its deeds."""

    def __init__(self) -> None:
        super().__init__()
        pairs = (pair.split(":") for pair in filter(None, os.environ.get("FAULTS", "").split(",")))
        self.deeds, self.passes = {int(at): DEEDS[name] for at, name in pairs}, 0

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
            if self.passes in self.deeds:
                self.deeds[self.passes]()
        return inputs


def net(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    return nn.Sequential(Faulty(), user_code.net(input_shape, num_classes))
