"""Restores best.pt, when a run resumes, to what the checkpoint says."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multigpu_cli.checkpoint.best import find_content, read_best
from multigpu_cli.checkpoint.files import publish
from multigpu_cli.checkpoint.lock import fail_on_write_error
from multigpu_cli.checkpoint.weights import copy_to_host, save_weights
from multigpu_cli.run.run import Run
from multigpu_cli.runtime.raise_on_all_ranks import run_on_main_rank
from multigpu_cli.runtime.schedule_free import eval_weights


def restore_best_file(run: Run) -> str:
    """Restore the best.pt that belongs to the checkpoint: the file in the folder may be of a later step, or missing.

    Returns:
        A warning if the best weights are lost, and the next evaluation is taken as the best; else "".
    """
    point, best, file = run.spec.resume_point, run.progress.best, run.folder / "best.pt"
    if not point.checkpoint:
        return ""
    sent = None
    if point.checkpoint_rank:
        sent = run_on_main_rank(run.world, lambda: _to_tensor(_read_best(run)), by=point.checkpoint_rank)
    is_best = bool(best) and best["step"] == run.progress.step
    own = _copy_published_weights(run) if is_best else {}

    def restore() -> bool:
        content = _read_best(run) if not point.checkpoint_rank else None if sent is None else sent.numpy().tobytes()
        checkpointer = run.checkpointer
        with fail_on_write_error(run.folder):
            if content is not None:
                checkpointer.best_sha256 = sha256(content).hexdigest()
                if find_content([file], checkpointer.best_sha256) is None:
                    publish(file, content)
            elif is_best:  # an old checkpoint, whose own state is the best
                checkpointer.best_sha256 = save_weights(file, own["model"], run.spec.weights_metadata(), best)
            elif file.is_file():
                file.replace(run.folder / "replaced_best.pt")
            return file.is_file()

    if run_on_main_rank(run.world, restore) or not best:
        return ""
    run.progress.best, run.progress.score, run.progress.stale_epochs = {}, [], 0
    return f"the best weights so far, of step {best['step']}, are lost: those of the next evaluation replace them"


def _copy_published_weights(run: Run) -> dict[str, Any]:
    """The weights that are evaluated and published, whole on the host of rank 0; all ranks call it together."""
    with eval_weights(run.state.optimizer):
        own = run.strategy.gather_state({"model": run.state.eval_model().state_dict()})
        return own if run.strategy.sharded else dict(copy_to_host(own))


def _read_best(run: Run) -> bytes | None:
    """The best weights that belong to the checkpoint, read on the node that has it."""
    point, best = run.spec.resume_point, run.progress.best
    if not best or not point.checkpoint or not point.manifest:
        return None
    checkpoint = Path(point.checkpoint)
    with fail_on_write_error(checkpoint):
        return read_best(checkpoint, point.manifest, int(best["step"]))


def _to_tensor(content: bytes | None) -> Tensor | None:
    return None if content is None else torch.frombuffer(bytearray(content), dtype=torch.uint8)
