"""Agrees over all nodes where a run resumes: each looks at its own disk, and the newest checkpoint of all counts."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from multigpu_cli.checkpoint.run_folder import (
    CheckpointNotFound,
    NoIntactCheckpoint,
    ResumePoint,
    choose_resume_point,
    read_note,
    resume_exists,
)
from multigpu_cli.config.schema import Config
from multigpu_cli.errors import TrainingError
from multigpu_cli.runtime.collectives import (
    all_gather,
    all_gather_object,
    broadcast_object,
    run_on_all_ranks,
    run_on_main_rank,
)
from multigpu_cli.runtime.restart_records import list_recorded_runs, record_run
from multigpu_cli.runtime.world import World

if TYPE_CHECKING:
    pass


def agree_on_resume_point(config: Config, world: World) -> ResumePoint:
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
