"""What an attempt takes over from the one before it, and what the gap between them has cost."""

import time
from pathlib import Path

import torch
from torch import Tensor

from multigpu_cli.checkpoint.files import publish
from multigpu_cli.checkpoint.lock import needed
from multigpu_cli.errors import counted
from multigpu_cli.run.parts import Run
from multigpu_cli.runtime.collectives import decided


def bring_best(run: Run) -> None:
    """The best weights so far lie in the folder that the run comes from; without them the next ones are the best."""
    if not run.settled.start.checkpoint or not run.progress.best:
        return
    holder = run.settled.start.holder
    there, here = Path(run.settled.start.checkpoint).parent.parent / "best.pt", run.folder / "best.pt"
    sent = decided(run.world, lambda: _content(there), by=holder) if holder else None

    def brought() -> bool:
        with needed(run.folder):
            if sent is not None:
                publish(here, sent.numpy().tobytes())
            elif not holder and there.is_file() and there.resolve() != here.resolve():
                publish(here, there.read_bytes())
            return here.is_file()

    if not decided(run.world, brought):
        run.progress.best, run.progress.score = {}, []


def _content(file: Path) -> Tensor | None:
    """A file as (n,) uint8, to be sent; None where it is not there."""
    return torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8) if file.is_file() else None


def note_recovery(run: Run) -> None:
    """The first step is done since the attempt before this one ended: what that has cost."""
    last, run.before = run.before, None
    if last is not None:
        lost = max(0, (last.step or 0) - (run.progress.step - 1))
        seconds = max(0.0, time.time() - last.moved)
        run.journal.write("recovery", step=run.progress.step, seconds=seconds, lost_steps=lost, cause=last.cause)
        run.console.note(f"recovered in {seconds:.1f} s, {counted(lost, 'step')} done again")
