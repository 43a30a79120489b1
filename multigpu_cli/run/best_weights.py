"""Restores best.pt, when a run resumes, to what the checkpoint says."""

from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from multigpu_cli.checkpoint.best import find_content, read_best
from multigpu_cli.checkpoint.files import publish
from multigpu_cli.checkpoint.lock import fail_on_write_error
from multigpu_cli.checkpoint.weights import save_weights
from multigpu_cli.runtime.collectives import run_on_main_rank

if TYPE_CHECKING:
    from multigpu_cli.run.training_run import Run


def restore_best_file(run: "Run") -> str:
    """Make best.pt what the checkpoint counts on: the one in the folder may be of another future, or of none.

    Returns:
        What is lost, in words: the next evaluation is the best then. "" where nothing is.
    """
    start, best, here = run.spec.resume_point, run.progress.best, run.folder / "best.pt"
    if not start.checkpoint:
        return ""
    sent = (
        run_on_main_rank(run.world, lambda: _to_tensor(_read_best(run)), by=start.checkpoint_rank)
        if start.checkpoint_rank
        else None
    )

    def put_in_place() -> bool:
        if start.checkpoint_rank:
            content = None if sent is None else sent.numpy().tobytes()
        else:
            content = _read_best(run)
        with fail_on_write_error(run.folder):
            if content is not None:
                run.checkpointer.best_sha256 = sha256(content).hexdigest()
                if find_content([here], run.checkpointer.best_sha256) is None:
                    publish(here, content)
            elif best and best["step"] == run.progress.step:  # an older version's: it is the checkpoint's own state
                run.checkpointer.best_sha256 = save_weights(
                    here, run.state.eval_model().state_dict(), run.spec.weights_metadata(), best
                )
            elif here.is_file():
                here.replace(run.folder / "replaced_best.pt")
            return here.is_file()

    if run_on_main_rank(run.world, put_in_place) or not best:
        return ""
    run.progress.best, run.progress.score, run.progress.stale_epochs = {}, [], 0
    return f"the best weights so far, of step {best['step']}, have gone: the next evaluation's take their place"


def _read_best(run: "Run") -> bytes | None:
    """The best weights that the checkpoint counts on, on the disk of its holder."""
    start, best = run.spec.resume_point, run.progress.best
    if not best or not start.checkpoint or not start.manifest:
        return None
    with fail_on_write_error(Path(start.checkpoint)):
        return read_best(Path(start.checkpoint), start.manifest, int(best["step"]))


def _to_tensor(content: bytes | None) -> Tensor | None:
    """(n,) uint8, to be sent."""
    return None if content is None else torch.frombuffer(bytearray(content), dtype=torch.uint8)
