"""Resolves a request into a RunSpec: folder, data and plan (with reasons), all checked before anything is written."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from multigpu_cli.capabilities import BEFORE_PINNED, BEFORE_RESUME, CHECK_BASE, STRATEGY_SETTINGS, load_given
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
from multigpu_cli.config.code_names import FOLLOWING, check_code, check_new_run, describe_origin
from multigpu_cli.config.paths import explain_dataset
from multigpu_cli.config.regular_files import UnsafeFolder
from multigpu_cli.config.resume_rules import merge_with_checkpoint, replace_settings
from multigpu_cli.config.schema import SETTINGS, Config
from multigpu_cli.config.sources import list_private
from multigpu_cli.data.fingerprint import compute_fingerprint, find_shared_samples
from multigpu_cli.data.load import open_data
from multigpu_cli.data.source import DataSource
from multigpu_cli.distributed.launch_env import list_recorded_runs, record_run
from multigpu_cli.distributed.placement import Placement, count_cores
from multigpu_cli.distributed.world import (
    World,
    all_gather_object,
    broadcast_object,
    disable_collective_timeout,
    run_on_all_ranks,
    run_on_main_rank,
)
from multigpu_cli.errors import RequestError, TrainingError, combine_errors, raise_all
from multigpu_cli.planning.batch import BatchPlan, plan_batches
from multigpu_cli.planning.plan import Plan
from multigpu_cli.planning.schedule import Rate, ScheduleFunction, find_rate, plan_schedule, resolve_learning_rate
from multigpu_cli.run.request.checks import check_data, check_device, check_same_data, check_same_machine
from multigpu_cli.run.request.spec import FromConfig, RunRequest, RunSpec, describe_machine
from multigpu_cli.runtime.factories import bind_call, find_factory
from multigpu_cli.runtime.precision import agree_on_precision
from multigpu_cli.runtime.seeding import set_threads_per_rank

_AUGMENTS = ("data.mixup", "data.cutmix", "data.random_resized_crop", "data.rand_augment")
_EXTRAS = ("task.class_weights", "data.sample_weights", *_AUGMENTS)
_PROVISIONAL = 32  # stands for --batch-size auto until it has been measured


def make_plan(request: RunRequest, world: World) -> Plan:
    """Make the plan of a run, the same on every rank.

    Raises RequestError if batch sizes, workers, samples and schedule do not fit together.
    """
    config, placement, source, start = request.config, request.placement, request.source, request.resume_point
    epochs, exact = source.epochs or config.length.epochs, config.reproducibility.exact
    batches = _plan_batches(request, world)
    base, rate_settings = _resolve_rate(request, batches), request.user_config.rate
    precision = agree_on_precision(config.precision.amp, world, placement.devices)
    workers_here = len(placement.devices) if placement.num_processes_to_launch else world.local_size
    schedule = plan_schedule(
        peak=base.value,
        shape=config.rate.schedule,
        steps_per_epoch=batches.steps_per_epoch,
        epochs=epochs,
        max_steps=config.length.max_steps,
        warmup_epochs=config.rate.warmup_epochs,
        args=config.rate.args,
        function=run_on_all_ranks(world, lambda: _load_schedule(config)),
    )
    rate, every = request.factories.explain_rate(config, base, batches, epochs, schedule.total_steps)
    return Plan(
        placement_reason=f"{placement.strategy}{' with --exact' if exact else ''}: {placement.reason}",
        strategy=placement.strategy,
        device=_name_device(world),
        batches=batches,
        rate=rate,
        schedule=schedule,
        scheduler_every=every,
        base_lr=rate_settings.base_lr or find_rate(config.optimizer.name) if rate_settings.lr is None else None,
        base_batch_size=config.rate.base_batch_size,
        precision=precision.name,
        precision_reason="as the run was started with" if start.manifest else precision.reason,
        description=f"{request.model} on {_describe_data(request)}, {request.task}{_describe_extras(config)}",
        resume_reason=start.reason,
        unused_flags=_list_unused_flags(request),
        save_dir=start.folder,
        epochs=epochs,
        batch_size_reason="to be measured before the first step" if config.batch.size == "auto" else "",
        threads=set_threads_per_rank(workers_here, count_cores(), exact=exact),
        notes={"compiled": _describe_compilation(request, world), "from_files": config.from_files},
        data=request.source.note.removesuffix("; ") if request.source.codec.record else "",
    )


def _plan_batches(request: RunRequest, world: World) -> BatchPlan:
    """Plan the batches for the number of workers, which for dp is its number of devices."""
    config, placement, source = request.config, request.placement, request.source
    processes = max(world.size, placement.num_processes_to_launch)
    micro_batch, global_batch = source.fixed_batch_sizes or (config.batch.size, config.batch.global_size)
    return plan_batches(
        samples=source.num_train_samples,
        micro_batch=_PROVISIONAL if micro_batch == "auto" else int(micro_batch),
        workers={"single": 1, "dp": len(placement.devices)}.get(placement.strategy, processes),
        accumulation=config.batch.grad_accum_steps,
        global_batch=global_batch,
        drop_last=config.batch.drop_last,
        interleaved=request.strategy.interleaved,
    )


def _describe_compilation(request: RunRequest, world: World) -> str:
    """Name the compiler's mode, or suggest it if it would probably pay; "" if there is nothing to say."""
    if request.config.model.compile != "off":
        return f"{request.config.model.compile}{request.strategy.compile_note}"
    is_exact, is_dp = request.config.reproducibility.exact, request.placement.strategy == "dp"
    pays = world.device.type == "cuda" and not is_dp and not is_exact
    return "off: --compile default is often faster on a GPU, after a minute or two" if pays else ""


def _load_schedule(config: Config) -> ScheduleFunction | None:
    """The user's own schedule with its arguments; None for one by name."""
    name, args = config.rate.schedule, config.rate.args
    if ":" not in name:
        return None
    function = find_factory(name, {}, flag="--schedule")
    problem = f"--schedule {name}: can't be called with step, total and schedule.args"
    remedy = "a function of (step, total), which returns the factor of the peak rate"
    if further := ", ".join(list(inspect.signature(function).parameters)[2:]):
        remedy += f"; schedule.args has {further}"
    return bind_call(function, 2, args, problem=problem, remedy=remedy)


def _resolve_rate(request: RunRequest, batches: BatchPlan) -> Rate:
    settings = request.config.rate
    rate = resolve_learning_rate(
        given=settings.lr,
        base=settings.base_lr,
        base_batch=settings.base_batch_size,
        global_batch=batches.global_batch,
        rule=settings.lr_scaling,
        optimizer=request.config.optimizer.name,
    )
    if request.resume_point.manifest:
        return rate._replace(reason=f"{rate.value:.4g}, as the run was started with")
    return rate


def _describe_extras(config: Config) -> str:
    """Weights of classes and further augmentation, where they are asked for."""
    given = {key.partition(".")[2].replace("_", " "): config.get(key) for key in _EXTRAS}
    words = ", ".join(f"{name} {value}" for name, value in given.items() if value is not None)
    return words and f" with {words}"


def _describe_data(request: RunRequest) -> str:
    source, reason = request.source, explain_dataset(request.config)
    own = "" if source.codec.record else source.note  # else it has a row of its own
    note = f"{reason}: {own}" if reason else own
    return f"{request.config.data.name} ({note}{source.num_train_samples:,} training {source.noun})"


def _list_unused_flags(request: RunRequest) -> list[str]:
    """Flags that were given, other than by default, and have no effect here: the plan names them."""
    config, unused = request.config, request.factories.list_unused(request.config)
    unused |= {"data_on_device"} if request.placement.devices[0].type == "cpu" else set()
    strategy = request.placement.strategy
    unused |= {*chain(*STRATEGY_SETTINGS.values())} - {*STRATEGY_SETTINGS.get(strategy, ())}
    ddp_arguments = sorted(request.factories.ddp) if strategy != "ddp" else []
    changed = sorted(key for key in unused & config.explicit if config.get(key) != SETTINGS[key].default)
    return [SETTINGS[key].flag or key for key in changed] + ddp_arguments


def _name_device(world: World) -> str:
    return torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else world.device.type


def _adopt_pins(command: Config, start: ResumePoint, origin: str) -> tuple[Config, Config]:
    """Return the settings of the command merged with those of the checkpoint, and the same with its pinned values.

    `origin` is the run folder of the checkpoint. Raises RequestError if the command contradicts a pinned value.
    """
    user_config, pinned = command, {}
    if manifest := start.manifest:
        pinned = manifest["pins"]
        user_config = merge_with_checkpoint(command, manifest["settings"], manifest["written"], pinned, origin)
    elif start.global_batch and not command.batch.global_size:
        pinned = {"global_batch_size": start.global_batch}
    if not pinned:
        return user_config, user_config
    # accumulation isn't pinned: it is derived again from the number of workers
    earlier = {key: value for key, value in BEFORE_PINNED.items() if manifest and key not in user_config.explicit}
    fixed = earlier | {key: value for key, value in pinned.items() if key in SETTINGS} | {"grad_accum_steps": None}
    return user_config, replace_settings(user_config, fixed | ({"base_lr": None} if "lr" in pinned else {}))


def _list_ignored(origin: str, command: Config) -> list[str]:
    """Return a warning for each private setting in the config.yaml of a run that the command does not repeat."""
    reason = f"is not taken from {origin}/config.yaml, which may be somebody else's: give it again"
    return [f"--{key} {reason}" for key in list_private(Path(origin)) if not command.get(key)]


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

    `moved` is called as a checkpoint is copied to the run folder, which `note` shows, or the data is read.
    RequestError: the request can't be carried out; nothing was written, but for a copied checkpoint.
    """
    start = agree_on_resume_point(config, world, moved, note)
    manifest, command = start.manifest, config
    if not manifest:
        check_new_run(command, start.folder)
    origin = str(Path(str(start.checkpoint)).parents[1]) if start.checkpoint else ""
    user_config, config = _adopt_pins(command, start, origin)
    check_code(config, command, str(start.checkpoint), (*factories.named, *FOLLOWING))
    source = run_on_all_ranks(world, lambda: _open_source(config, placement, world, factories, moved, start))
    if manifest and (base := manifest["settings"].get("base")):
        for check in load_given(CHECK_BASE, config):
            run_on_main_rank(world, partial(check, base, config, source.codec.record, origin))
    fingerprint = run_on_all_ranks(world, lambda: compute_fingerprint(source, config.reproducibility.seed))
    ignored = run_on_main_rank(world, lambda: _list_ignored(origin, command)) if manifest else []
    source = replace(source, warnings=(*ignored, *source.warnings, *find_shared_samples(source, fingerprint)))
    if world.size > 1:
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
    machine = describe_machine(plan, placement) if config.reproducibility.exact else {}
    spec = RunSpec(**vars(request), plan=plan, data_fingerprint=fingerprint, machine=machine, base=base)
    if world.size > 1 and machine:
        check_same_machine(world, machine)
    raise_all(check_data(spec))
    return spec


def _open_source(
    config: Config, placement: Placement, world: World, factories: FromConfig, moved: Moved, start: ResumePoint
) -> DataSource:
    """Load the dataset, whose classes a checkpoint may know; raise its errors and those of the device together."""
    classes = start.manifest["settings"].get("built_for", {}).get("num_classes") if start.manifest else None
    errors = list(check_device(config, placement, world))
    try:
        source = factories.source or open_data(config, moved, classes)
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
    rank 0 has moved: that node sends it. `moved` is called as a checkpoint is copied to the run folder, and `note`
    shows that it is. RequestError: no node has a checkpoint to resume from, although one is required, or all are
    damaged; or one can't be brought from where --mirror says. TrainingError: an earlier attempt is active there.
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
        return ResumePoint(**run_on_main_rank(world, lambda: vars(choose())))
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
    values = broadcast_object(world, vars(point) if point and world.rank == newest else None, source=newest)
    return ResumePoint(**values | {"checkpoint_rank": newest})


def _raise_start_error(error: TrainingError | None, world: World, *, somewhere: bool) -> None:
    """Raise rank 0's error, because rank 0 writes the folder; on other ranks that of damaged checkpoints, or of a link.

    `somewhere`: some node has an intact checkpoint, which the others may lack.
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
    return replace(start, manifest=start.manifest | {"pins": start.manifest["pins"] | {"batch_size": smaller}})
