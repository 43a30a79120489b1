"""Where a run resumes, as all nodes agree, and what an attempt takes over from the one before it.

Each node looks at its own disk, and the newest checkpoint of all counts.
"""

import time
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from multigpu_cli.checkpoint.best import find_content, read_best
from multigpu_cli.checkpoint.files import publish
from multigpu_cli.checkpoint.lock import fail_on_write_error
from multigpu_cli.checkpoint.run_folder import (
    CheckpointNotFound,
    NoIntactCheckpoint,
    ResumePoint,
    choose_resume_point,
    read_note,
    resume_exists,
)
from multigpu_cli.checkpoint.weights import save_weights
from multigpu_cli.config.schema import Config
from multigpu_cli.errors import TrainingError, pluralize
from multigpu_cli.runtime.collectives import all_gather, all_gather_object, broadcast_object
from multigpu_cli.runtime.rank_errors import run_on_all_ranks, run_on_main_rank
from multigpu_cli.runtime.restart_records import list_recorded_runs, record_run
from multigpu_cli.runtime.world import World

if TYPE_CHECKING:
    from multigpu_cli.run.run_state import Run


def agree_on_start(config: Config, world: World) -> ResumePoint:
    """Run folder and checkpoint, the same on every rank.

    On a shared file system all nodes see the same, and rank 0's word counts. On local ones a node may have what rank 0
    lacks, after rank 0 has moved: then that node sends it.

    Raises:
        RequestError: rank 0 can't begin and no other node has a checkpoint, or all that there are are damaged.
        TrainingError: an earlier attempt is still at work in the folder.
    """
    begun = _find_earlier_folders(world)
    start = _apply_notes(_agree(config, world, begun), world)
    if start.folder in begun and world.local_rank == 0:
        record_run(world.agent_dir, world.attempt, start.folder)
    return start


def _find_earlier_folders(world: World) -> list[str]:
    """Run folders of this launch's earlier attempts that this one has not come to: as some node remembers them."""
    if not world.attempt:
        return []
    now = list_recorded_runs(world.agent_dir, [world.attempt])
    earlier = [run for run in list_recorded_runs(world.agent_dir, range(world.attempt)) if run not in now]
    return next(filter(None, all_gather_object(world, earlier)), [])


def _agree(config: Config, world: World, begun: list[str]) -> ResumePoint:
    if world.size == world.local_size:
        return ResumePoint(
            **run_on_main_rank(world, lambda: choose_resume_point(config, attempt=world.attempt, begun=begun).as_dict())
        )
    first = world.local_rank == 0
    elsewhere = any(all_gather_object(world, first and resume_exists(config.checkpoint.resume)))
    found, error = _look_for_start(config, world, begun, elsewhere=elsewhere) if first else (None, None)
    reached = int(found.manifest["step"]) + 1 if found and found.manifest else 0
    steps = [int(step) for step in all_gather(world, torch.tensor([reached], device=world.device))]
    holder = steps.index(max(steps))
    run_on_all_ranks(world, lambda: _raise_start_error(error, world, somewhere=max(steps) > 0))
    start = ResumePoint(
        **broadcast_object(world, found.as_dict() if found and world.rank == holder else None, source=holder)
    )
    return replace(start, checkpoint_rank=holder)


def _look_for_start(
    config: Config, world: World, begun: list[str], *, elsewhere: bool
) -> tuple[ResumePoint | None, TrainingError | None]:
    try:
        return choose_resume_point(config, attempt=world.attempt, begun=begun, elsewhere=elsewhere), None
    except TrainingError as error:
        return None, error


def _raise_start_error(error: TrainingError | None, world: World, *, somewhere: bool) -> None:
    """Rank 0's complaint counts, for it writes the folder; of damaged checkpoints, anybody's.

    Args:
        somewhere: some node has a whole checkpoint, which the others may lack.
    """
    if error is None or (somewhere and isinstance(error, CheckpointNotFound)):
        return
    if world.is_main or isinstance(error, NoIntactCheckpoint):
        raise error


def _apply_notes(start: ResumePoint, world: World) -> ResumePoint:
    """A rank that ran out of memory left word of smaller micro-batches on its own node."""
    note = read_note(Path(start.folder)) if world.local_rank == 0 else {}
    local = torch.tensor([note.get(name) or 0 for name in ("batch_size", "global_batch_size")], device=world.device)
    sizes = [(size, whole) for size, whole in torch.stack(all_gather(world, local)).tolist() if size]
    if not sizes:
        return start
    smaller, whole = min(sizes)
    note_text = f"out of memory in an earlier attempt: micro-batches of {smaller}"
    start = replace(start, warnings=[*start.warnings, note_text])
    if not start.manifest:
        return replace(start, micro_batch_after_oom=smaller, global_batch=whole or None)
    pinned = start.manifest["pins"] | {"batch_size": smaller}
    return replace(start, manifest=start.manifest | {"pins": pinned})


def restore_best_weights(run: "Run") -> str:
    """Make best.pt what the checkpoint counts on: the one in the folder may be of another future, or of none.

    Returns:
        What is lost, in words: the next evaluation is the best then. "" where nothing is.
    """
    start, best, here = run.spec.start, run.progress.best, run.folder / "best.pt"
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
    start, best = run.spec.start, run.progress.best
    if not best or not start.checkpoint or not start.manifest:
        return None
    with fail_on_write_error(Path(start.checkpoint)):
        return read_best(Path(start.checkpoint), start.manifest, int(best["step"]))


def _to_tensor(content: bytes | None) -> Tensor | None:
    """(n,) uint8, to be sent."""
    return None if content is None else torch.frombuffer(bytearray(content), dtype=torch.uint8)


def log_recovery(run: "Run") -> None:
    """The first step is done since the attempt before this one ended: what that has cost."""
    last, run.control.previous_attempt = run.control.previous_attempt, None
    if last is not None:
        lost = max(0, (last.step or 0) - (run.progress.step - 1))
        seconds = max(0.0, time.time() - last.last_progress_time)
        run.log.journal.write("recovery", step=run.progress.step, seconds=seconds, lost_steps=lost, cause=last.cause)
        run.log.console.note(f"recovered in {seconds:.1f} s, {pluralize(lost, 'step')} done again")
