"""Resolves a request into a RunSpec: folder, data and plan, all checked before anything is written."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from multigpu_cli.capabilities import BEFORE_RESUME, CHECK_BASE, load_given
from multigpu_cli.checkpoint.files import Moved, ignore_progress
from multigpu_cli.checkpoint.manifest import find_damaged_piece, find_quick_damage, list_pieces, read_manifest
from multigpu_cli.checkpoint.run_folder import (
    CheckpointNotFound,
    NoIntactCheckpoint,
    ResumePoint,
    choose_resume_point,
    read_note,
    resume_exists,
)
from multigpu_cli.config.code_names import FOLLOWING, check_code, describe_origin
from multigpu_cli.config.paths import UnsafeFolder
from multigpu_cli.config.resume_rules import merge_with_checkpoint, replace_settings
from multigpu_cli.config.schema import SETTINGS, Config
from multigpu_cli.data.fingerprint import compute_fingerprint
from multigpu_cli.data.source import DataSource
from multigpu_cli.distributed.attempts import list_recorded_runs, record_run
from multigpu_cli.distributed.collectives import (
    all_gather_object,
    broadcast_object,
    disable_collective_timeout,
    run_on_all_ranks,
    run_on_main_rank,
)
from multigpu_cli.distributed.placement import Placement
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError, TrainingError, combine_errors
from multigpu_cli.run.request.checks import check_data, check_device, raise_all
from multigpu_cli.run.request.from_config import FromConfig
from multigpu_cli.run.request.make_plan import make_plan
from multigpu_cli.run.request.spec import RunRequest, RunSpec, describe_machine


def prepare_spec(
    config: Config,
    placement: Placement,
    world: World,
    factories: FromConfig,
    *,
    moved: Moved = ignore_progress,
    note: Callable[[str], None] = print,
) -> RunSpec:
    """Choose the folder, adopt what its checkpoint pins, load the data and make the plan.

    Args:
        factories: build what the run consists of.
        moved: called as a checkpoint is copied to the run folder, or the data is read.
        note: shows that a checkpoint is copied.

    Raises:
        RequestError: the request can't be carried out; nothing was touched.
    """
    start = agree_on_resume_point(config, world, moved, note)
    pinned: dict[str, Any] = {}
    user_config, origin = config, str(Path(str(start.checkpoint)).parents[1]) if start.checkpoint else ""
    if manifest := start.manifest:
        pinned = manifest["pins"]
        user_config = merge_with_checkpoint(config, manifest["settings"], manifest["written"], pinned, origin)
    elif start.global_batch and not config.batch.global_size:
        pinned = {"global_batch_size": start.global_batch}
    command, config = config, user_config
    if pinned:  # accumulation is derived anew from the number of workers
        fixed = {key: value for key, value in pinned.items() if key in SETTINGS} | {"grad_accum_steps": None}
        config = replace_settings(user_config, fixed | ({"base_lr": None} if "lr" in pinned else {}))
    check_code(config, command, str(start.checkpoint), (*factories.named, *FOLLOWING))
    source = run_on_all_ranks(world, lambda: _open_source(config, placement, world, factories, moved))
    if manifest and (base := manifest["settings"].get("base")):
        for check in load_given(CHECK_BASE, config):
            run_on_main_rank(world, partial(check, base, config, source.codec.record, origin))
    fingerprint = run_on_all_ranks(world, lambda: compute_fingerprint(source, config.reproducibility.seed))
    if world.size > 1:
        from multigpu_cli.run.request.checks import check_same_data, check_same_machine

        check_same_data(world, source, fingerprint, config.data.name)
    request = RunRequest(
        user_config=user_config,
        config=replace(config, from_files=describe_origin(config, command, origin)),
        placement=placement,
        resume_point=start,
        source=source,
        factories=factories,
    )
    plan, base = make_plan(request, world), dict(source.codec.record)
    spec = RunSpec(**vars(request), plan=plan, data_fingerprint=fingerprint, base=base)
    if world.size > 1 and config.reproducibility.exact:
        check_same_machine(world, describe_machine(spec.plan))
    raise_all(check_data(spec))
    return spec


def _open_source(config: Config, placement: Placement, world: World, factories: FromConfig, moved: Moved) -> DataSource:
    """The dataset; errors of the dataset and of the device are raised together."""
    errors = list(check_device(config, placement, world))
    try:
        source = factories.open_source(config, moved)
    except RequestError as error:
        raise combine_errors([*errors, error]) from error
    raise_all(errors)
    return source


def with_measured_batch(spec: RunSpec, size: int, world: World, reason: str) -> RunSpec:
    """The request with the micro-batch that --batch-size auto measured; without --global-batch-size G follows it."""
    spec = replace(spec, config=replace_settings(spec.config, {"batch_size": size}))
    return replace(spec, plan=replace(make_plan(spec, world), batch_size_reason=reason, notes=spec.plan.notes))


def agree_on_resume_point(
    config: Config, world: World, moved: Moved = ignore_progress, note: Callable[[str], None] = print
) -> ResumePoint:
    """Run folder and checkpoint, the same on every rank.

    On a shared file system rank 0 decides for all. With local disks another node may have the newest checkpoint, after
    rank 0 has moved: that node sends it.

    Args:
        moved: called as a checkpoint is copied to the run folder.
        note: shows that it is.

    Raises:
        RequestError: no node has a checkpoint to resume from, although one is required, or all are damaged; or
            one can't be brought from where --mirror says.
        TrainingError: an earlier attempt is still active in the folder.
    """
    begun = _find_earlier_folders(world)
    skipped: list[str] = []
    for restore in load_given(BEFORE_RESUME, config):
        disable_collective_timeout(world)  # it may take hours to copy a checkpoint
        bring = partial(restore, config, attempt=world.attempt, begun=begun, moved=moved, note=note)
        restored, skipped = run_on_main_rank(world, bring)
        if restored:
            config = replace(config, checkpoint=replace(config.checkpoint, save_dir=restored))
    damaged: dict[str, str] = {}
    while damage := _find_damaged_piece(start := _agree(config, world, begun, damaged), world):
        damaged[_name_content(start.manifest)] = damage
    start = _apply_notes(replace(start, warnings=[*skipped, *start.warnings]), world)
    if start.folder in begun and world.local_rank == 0:
        record_run(world.agent_dir, world.attempt, start.folder)
    return start


def _find_earlier_folders(world: World) -> list[str]:
    """Run folders of this launch's earlier attempts that this attempt has not reached, as some node recorded them."""
    if not world.attempt:
        return []
    now = list_recorded_runs(world.agent_dir, [world.attempt])
    earlier = [run for run in list_recorded_runs(world.agent_dir, range(world.attempt)) if run not in now]
    return next(filter(None, all_gather_object(world, earlier)), [])


def all_ranks_see(start: ResumePoint, world: World) -> bool:
    """Whether each rank finds the checkpoint on its own machine, or on a disk that all share."""
    return all(all_gather_object(world, _sees(start)))


def _sees(start: ResumePoint) -> bool:
    try:
        return _name_content(read_manifest(Path(start.checkpoint or ""))) == _name_content(start.manifest)
    except (OSError, ValueError, TypeError):
        return False


def _name_content(manifest: dict[str, Any] | None) -> str:
    """The checksum of a manifest, and so of all that it lists: the same wherever a copy of the checkpoint lies."""
    return str((manifest or {}).get("sha256"))


def _find_damaged_piece(start: ResumePoint, world: World) -> str | None:
    """What is wrong with the pieces of the chosen checkpoint: those who see it each read a share of them."""
    if not start.manifest or not list_pieces(start.manifest):
        return None
    readers = [rank for rank, sees in enumerate(all_gather_object(world, _sees(start))) if sees]
    damage = None
    if world.rank in readers:
        damage = find_damaged_piece(Path(str(start.checkpoint)), readers.index(world.rank), len(readers))
    return next(filter(None, all_gather_object(world, damage)), None)


def _agree(config: Config, world: World, begun: list[str], damaged: dict[str, str]) -> ResumePoint:
    def find_damage(folder: Path) -> str | None:
        return find_quick_damage(folder) or damaged.get(_name_content(read_manifest(folder)))

    choose = partial(choose_resume_point, config, attempt=world.attempt, begun=begun, find_damage=find_damage)
    if world.size == world.local_size:
        return ResumePoint(**run_on_main_rank(world, lambda: choose().as_dict()))
    first_on_node = world.local_rank == 0
    elsewhere = any(all_gather_object(world, first_on_node and resume_exists(config.checkpoint.resume)))
    point, error = None, None
    if first_on_node:
        try:
            point = choose(elsewhere=elsewhere)
        except TrainingError as caught:
            error = caught
    steps = all_gather_object(world, int(point.manifest["step"]) + 1 if point and point.manifest else 0)
    newest = steps.index(max(steps))
    run_on_all_ranks(world, lambda: _raise_start_error(error, world, somewhere=max(steps) > 0))
    values = broadcast_object(world, point.as_dict() if point and world.rank == newest else None, source=newest)
    return ResumePoint(**values | {"checkpoint_rank": newest})


def _raise_start_error(error: TrainingError | None, world: World, *, somewhere: bool) -> None:
    """Raise rank 0's error, because rank 0 writes the folder; on other ranks that of damaged checkpoints, or of a link.

    Args:
        somewhere: some node has an intact checkpoint, which the others may lack.
    """
    if error is None or (somewhere and isinstance(error, CheckpointNotFound)):
        return
    if world.is_main or isinstance(error, NoIntactCheckpoint | UnsafeFolder):
        raise error


def _apply_notes(start: ResumePoint, world: World) -> ResumePoint:
    """Apply the smallest batches of the notes that ranks left on their nodes after out of memory."""
    notes = all_gather_object(world, read_note(Path(start.folder)) if world.local_rank == 0 else {})
    if evaluated := [note["eval_batch_size"] for note in notes if note.get("eval_batch_size")]:
        note_text = f"out of memory in an evaluation of an earlier attempt: batches of {min(evaluated)}"
        start = replace(start, warnings=[*start.warnings, note_text], eval_batch_after_oom=min(evaluated))
    sizes = [(note["batch_size"], note.get("global_batch_size") or 0) for note in notes if note.get("batch_size")]
    if not sizes:
        return start
    smaller, global_batch = min(sizes)
    note_text = f"out of memory in an earlier attempt: micro-batches of {smaller}"
    start = replace(start, warnings=[*start.warnings, note_text])
    if not start.manifest:
        return replace(start, micro_batch_after_oom=smaller, global_batch=global_batch or None)
    pinned = start.manifest["pins"] | {"batch_size": smaller}
    return replace(start, manifest=start.manifest | {"pins": pinned})
