"""What an attempt takes over from the one before it, and what the gap between them has cost."""

import time
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from multigpu_cli.checkpoint.best import best_of, first_with
from multigpu_cli.checkpoint.files import publish
from multigpu_cli.checkpoint.lock import needed
from multigpu_cli.checkpoint.weights import save_weights
from multigpu_cli.errors import counted
from multigpu_cli.run.parts import Run
from multigpu_cli.runtime.collectives import decided


def bring_best(run: Run) -> str:
    """Make best.pt what the checkpoint counts on: the one in the folder may be of another future, or of none.

    Returns:
        What is lost, in words: the next evaluation is the best then. "" where nothing is.
    """
    start, best, here = run.settled.start, run.progress.best, run.folder / "best.pt"
    if not start.checkpoint:
        return ""
    sent = decided(run.world, lambda: _as_tensor(_best_there(run)), by=start.holder) if start.holder else None

    def brought() -> bool:
        if start.holder:
            content = None if sent is None else sent.numpy().tobytes()
        else:
            content = _best_there(run)
        with needed(run.folder):
            if content is not None:
                run.best_sum = sha256(content).hexdigest()
                if first_with([here], run.best_sum) is None:
                    publish(here, content)
            elif best and best["step"] == run.progress.step:  # an older version's: it is the checkpoint's own state
                run.best_sum = save_weights(here, run.kept.for_use().state_dict(), run.settled.label(), best)
            elif here.is_file():
                here.replace(run.folder / "replaced_best.pt")
            return here.is_file()

    if decided(run.world, brought) or not best:
        return ""
    run.progress.best, run.progress.score, run.progress.stale_epochs = {}, [], 0
    return f"the best weights so far, of step {best['step']}, have gone: the next evaluation's take their place"


def _best_there(run: Run) -> bytes | None:
    """The best weights that the checkpoint counts on, on the disk of its holder."""
    start, best = run.settled.start, run.progress.best
    if not best or not start.checkpoint or not start.manifest:
        return None
    with needed(Path(start.checkpoint)):
        return best_of(Path(start.checkpoint), start.manifest, int(best["step"]))


def _as_tensor(content: bytes | None) -> Tensor | None:
    """(n,) uint8, to be sent."""
    return None if content is None else torch.frombuffer(bytearray(content), dtype=torch.uint8)


def note_recovery(run: Run) -> None:
    """The first step is done since the attempt before this one ended: what that has cost."""
    last, run.before = run.before, None
    if last is not None:
        lost = max(0, (last.step or 0) - (run.progress.step - 1))
        seconds = max(0.0, time.time() - last.moved)
        run.journal.write("recovery", step=run.progress.step, seconds=seconds, lost_steps=lost, cause=last.cause)
        run.console.note(f"recovered in {seconds:.1f} s, {counted(lost, 'step')} done again")
