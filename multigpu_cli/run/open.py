"""Opens a run from its request, and closes it, also after a failure: for command line and Python API."""

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from multigpu_cli.capabilities import PART_STATES
from multigpu_cli.checkpoint.files import (
    check_owner,
    check_unlocked,
    fail_on_write_error,
    lock_folder,
    publish,
    remove_drafts,
)
from multigpu_cli.checkpoint.run_folder import rewind_run
from multigpu_cli.checkpoint.snapshot import Writer
from multigpu_cli.checkpoint.store import Store
from multigpu_cli.config.resume_rules import choose_mode
from multigpu_cli.config.schema import Config
from multigpu_cli.distributed.launch_env import LaunchEnv, leave_failures_to_watchdog, record_run
from multigpu_cli.distributed.placement import Placement, describe_unlike_gpus, gpu_models
from multigpu_cli.distributed.process_group import process_group
from multigpu_cli.distributed.processes import log_path
from multigpu_cli.distributed.world import (
    World,
    all_reduce_max,
    disable_collective_timeout,
    run_on_all_ranks,
    run_on_main_rank,
)
from multigpu_cli.errors import RequestError, TrainingError, pluralize
from multigpu_cli.faults.explain import hide_secrets, name_unused_parameters
from multigpu_cli.faults.rank_exits import read_previous_cause
from multigpu_cli.faults.root_cause import summary_line
from multigpu_cli.faults.stop import SkippedStepLimit, StopConsensus, StopRequest
from multigpu_cli.faults.watchdog import STARTUP_TIMEOUT, Watchdog
from multigpu_cli.models.build import list_unused_methods
from multigpu_cli.monitor.console import Console
from multigpu_cli.monitor.gpu import Sampler, peak_flops
from multigpu_cli.monitor.journal import Event, Journal
from multigpu_cli.monitor.meters import NoiseMeter, SampleTrace, StepTimer
from multigpu_cli.monitor.run_state import RunState
from multigpu_cli.run.assembly.assemble import build_components
from multigpu_cli.run.assembly.components import TrainComponents, describe_groups
from multigpu_cli.run.batch_size import fit_batch_sizes_to_memory, try_micro_batch
from multigpu_cli.run.checkpointing import finish_pending_checkpoint
from multigpu_cli.run.finalize import build_summary, restore_best_file, write_run_end
from multigpu_cli.run.global_batch import describe_global_loss
from multigpu_cli.run.guard.first_batch import check_user_code
from multigpu_cli.run.part import Part, bind_moments, load_parts
from multigpu_cli.run.request.checks import find_unpinned_facts
from multigpu_cli.run.request.prepare import prepare_spec
from multigpu_cli.run.request.spec import FromConfig, RunSpec, with_notes
from multigpu_cli.run.run import Checkpointer, CheckpointSchedule, LossMeter, Run, RunControl, RunLog, StepObserver
from multigpu_cli.run.step import count_flops_per_sample
from multigpu_cli.run.train_log import journal_start
from multigpu_cli.runtime.seeding import choose_kernels


class ResolvedRequest(NamedTuple):
    """A request that all ranks have resolved at `began`, with the signal handler and the watchdog that are active."""

    spec: RunSpec
    world: World
    stop: StopRequest
    watchdog: Watchdog
    console: Console
    began: float
    parts: list[Part]


@contextmanager
def resolve_request(
    config: Config,
    placement: Placement,
    launch_env: LaunchEnv | None,
    console: Console,
    on_fatal_error: Callable[[TrainingError], None],
    factories: FromConfig,
) -> Iterator[ResolvedRequest]:
    """Form the process group, for the context, and resolve the request on all ranks, or raise; nothing is written."""
    began = time.perf_counter()
    launch_env = launch_env and replace(launch_env, arrival=config.device.arrival_timeout)
    timeout = placement.timeout or max(STARTUP_TIMEOUT, config.fault.hang_timeout)
    with (
        leave_failures_to_watchdog(),
        process_group(launch_env, placement.devices[0], timeout=timeout, backend=placement.backend) as world,
        StopRequest() as stop,
        Watchdog(world, config.fault.hang_timeout, on_fatal_error) as watchdog,
    ):
        spec = prepare_spec(config, placement, world, factories, moved=watchdog.mark_progress, note=console.note)
        running = () if spec.is_complete else (*spec.plan.warnings(), *find_unpinned_facts(spec))
        for warning in (*spec.source.warnings, *running):
            console.warn(warning)
        parts = [] if spec.is_complete else load_parts(spec, world)
        with choose_kernels(world.device, spec.strategy.cudnn_benchmark, exact=spec.config.reproducibility.exact):
            yield ResolvedRequest(spec, world, stop, watchdog, console, began, parts)


def try_request(request: ResolvedRequest) -> dict[str, Any]:
    """Build the components as `open_run` does, try a micro-batch, and show the plan; nothing is written.

    Returns the plan, and what was tried. RequestError: the run would refuse the same. TrainingError: it would fail.
    """
    spec, world, console = request.spec, request.world, request.console
    plan, tried, components = spec.plan, "nothing: the run is complete", None
    if not spec.is_complete:
        run_on_main_rank(world, lambda: check_unlocked(Path(spec.resume_point.folder)))
        components = build_components(spec, world, request.parts)
        with closing(components.loaders):
            samples, memory_warnings = try_micro_batch(components)
            _examine_user_code(components, console)
        for warning in filter(None, [components.state.restore_warning, *memory_warnings]):
            console.warn(warning)
        plan = components.plan
        tried = f"forward and backward with {pluralize(samples, 'sample')}: model, data and task fit"
        tried += ", in one process" if spec.placement.num_processes_to_launch else ""
    console.plan([*plan.rows(), ("tried", tried)], "Plan")
    if components:
        _show_model_tables(components, console)
    facts = plan.as_dict() | {"tried": tried}
    console.print_json(facts)
    return facts


@contextmanager
def open_run(request: ResolvedRequest) -> Iterator[Run]:
    """Build the components, probe the memory, and lock the run folder for as long as the context lasts.

    A summary is written however the run ends: by `finish_run`, by `record_failure`, or else here, as stopped.
    RequestError: they do not fit, or the folder holds a completed run; nothing was written. TrainingError: it failed.
    """
    spec, world, stop, watchdog, console, began, parts = request
    if spec.is_complete:
        folder = spec.resume_point.folder
        raise RequestError(f"{folder} is complete", remedy="another --save-dir, or more --epochs")
    with ExitStack() as stack:
        components = build_components(spec, world, parts)
        stack.callback(components.loaders.close)
        memory_warnings = fit_batch_sizes_to_memory(components)
        _examine_user_code(components, console)
        for part in parts:
            part.fitted(components)
        console.plan(components.plan.rows(), "Plan")
        _show_model_tables(components, console)
        for entry, flag in PART_STATES.items():
            if left := sorted(components.state.part_states[entry]):
                console.note(f"{flag} {', '.join(left)}: not in this command, so its state is left out from now on")
        run_on_main_rank(world, lambda: stack.enter_context(lock_folder(Path(spec.resume_point.folder))))
        run = assemble_run(components, console, stop, watchdog, stack, parts)
        run.progress.startup_seconds += time.perf_counter() - began
        with record_failure(run):
            start_run(run, memory_warnings)
            for begin in run.moments.start:
                begin(run, stack)
            yield run
        if not run.control.summary_written:
            finish_pending_checkpoint(run)
            write_run_end(run, build_summary(run, "stopped", {}))


def _examine_user_code(components: TrainComponents, console: Console) -> None:
    """Warn of user code whose result depends on the number of workers, or raise; the last check of the first batch."""
    components.spec = with_notes(components.spec, global_loss=describe_global_loss(components))
    for warning in check_user_code(components):
        console.warn(warning)


def _show_model_tables(components: TrainComponents, console: Console) -> None:
    """Show beside the plan the learning rates of parts of the model, and where its first weights come from."""
    if groups := describe_groups(components):
        console.plan(groups, "Learning rates")
    if weights := components.state.initial_weights:
        console.plan(weights.rows(), f"Weights from {components.config.model.init_from}")
    if unused := list_unused_methods(components.state.model):
        console.warn(f"not called here: the model's {' and '.join(unused)}; --task, --optimizer and --lr decide")


@contextmanager
def record_failure(run: Run) -> Iterator[None]:
    """End the run on an error inside, or a hang: write the reason into its summary, and raise the root cause."""

    def failed(error: BaseException, rank: int | None = None) -> None:
        if run.control.summary_written:
            return
        known = getattr(error, "rank", None)
        cause = {"cause": summary_line(error), "rank": rank if known is None else known}
        summary = build_summary(run, "failed", {"error": hide_secrets(f"{type(error).__name__}: {error}")} | cause)
        write_run_end(run, summary)
        if run.world.restarts_left <= 0:  # no restart follows: --json prints this summary
            run.log.console.print_json(summary)

    run.observer.watchdog.before_fatal_exit = failed
    try:
        yield
    except BaseException as error:
        name_unused_parameters(error, [name for name, p in run.state.model.named_parameters() if p.requires_grad])
        reason = run.observer.watchdog.publish_and_find_root_cause(error)
        failed(reason, rank=None if reason is not error or getattr(error, "shared", False) else run.world.rank)
        raise reason from (None if reason is error else error)


def assemble_run(
    components: TrainComponents,
    console: Console,
    stop: StopRequest,
    watchdog: Watchdog,
    stack: ExitStack,
    parts: Sequence[Part] = (),
) -> Run:
    """Open what the run writes to in its folder, which this process group has locked; `stack` closes it."""
    world, config, plan, progress = components.world, components.config, components.plan, components.progress
    folder = Path(components.spec.resume_point.folder)
    board = None
    home = folder if world.is_main else None
    state = stack.enter_context(closing(RunState(home, watchdog.own, lambda: check_owner(folder), world.restarts_left)))
    if world.is_main:
        from multigpu_cli.monitor.tensorboard import TensorBoard  # late: rank 0 alone has one

        board = stack.enter_context(closing(TensorBoard(folder / "tensorboard", console.warn)))
    followers = [part.follow_journal(components, console, watchdog, stack) for part in parts if world.is_main]

    listeners = [each for each in (board, *followers) if each]
    journal, trace = run_on_all_ranks(world, lambda: _open_files(components, listeners, console, stack))
    components.task.moved, components.strategy.on_gather = watchdog.mark_progress, watchdog.count_arrival
    progress_bar = stack.enter_context(closing(console.progress(plan.schedule.total_steps, progress.step)))
    store = Store(folder / "checkpoints", config.checkpoint.keep, watchdog.mark_progress)
    writer = stack.enter_context(Writer())
    saver = components.strategy.create_saver(store, writer)
    if saver.note:
        console.note(saver.note)
    saved_step = -1 if progress.evaluation_pending else progress.step  # an evaluation makes it another state
    gpu = None
    if world.device.type == "cuda":
        gpu = stack.enter_context(closing(Sampler(str(torch.cuda.get_device_properties(world.device).uuid))))
    run = Run(
        **{each.name: getattr(components, each.name) for each in fields(TrainComponents)},
        observer=_make_observer(components, watchdog, trace),
        checkpointer=Checkpointer(store, writer, saver, CheckpointSchedule(config.checkpoint), saved_step),
        log=RunLog(journal, board, console, progress_bar, state, gpu, _count_flops(components)),
        control=RunControl(stop, StopConsensus(world), world.previous_attempt if world.attempt else None),
        moments=bind_moments(parts),
    )
    progress_bar.read_newest = run.read_newest_numbers
    return run


def _count_flops(components: TrainComponents) -> float | None:
    """FLOPs of a sample, if some device's peak rate is known; counting costs a forward and backward pass."""
    known = peak_flops(components.plan.device, components.state.precision.name) is not None
    if not all_reduce_max(components.world, [known])[0]:  # all ranks count or none, since the passes may communicate
        return None
    return count_flops_per_sample(components)


def _open_files(
    components: TrainComponents, listeners: Sequence[Callable[[Event], None]], console: Console, stack: ExitStack
) -> tuple[Journal, SampleTrace | None]:
    """Open the journal, which only rank 0 writes, and with --trace-samples the file of each step's samples."""
    world, folder = components.world, Path(components.spec.resume_point.folder)
    with fail_on_write_error(folder):
        path = folder / "journal.jsonl" if world.is_main else None
        journal = stack.enter_context(closing(Journal(path, listeners, console.warn)))
        if not components.config.log.trace_samples:
            return journal, None
        trace = SampleTrace(folder / "samples.jsonl", world, components.plan.batches.global_batch, console.warn)
        return journal, stack.enter_context(closing(trace))


def _make_observer(components: TrainComponents, watchdog: Watchdog, trace: SampleTrace | None) -> StepObserver:
    """Make the meters that watch each step."""
    world, config = components.world, components.config
    fp16, global_loss = components.state.precision.name == "fp16", components.task.global_loss
    timer = StepTimer(device_runs_ahead=world.device.type == "cuda")
    # fp16's scale changes from step to step, and a global loss is not a mean over samples: noise can't be measured
    noise = NoiseMeter(0 if fp16 or global_loss else config.log.interval, components.strategy.loss_factor)
    nonfinite = SkippedStepLimit(config.fault.nonfinite, world.device, fp16=fp16)
    loss = LossMeter(world, components.progress, components.plan.batches.steps_per_epoch)
    return StepObserver(watchdog, timer, noise, nonfinite, loss, trace, not components.loaders.train.ready)


def start_run(run: Run, memory_warnings: list[str]) -> None:
    """Write the settings and the first lines of this attempt, with the faults that came before it."""
    world, start, log, logs = run.world, run.spec.resume_point, run.log, run.folder / "logs"
    if world.local_rank == 0:
        record_run(world.agent_dir, world.attempt, str(run.folder))
    run_on_main_rank(world, lambda: _prepare_folder(run))
    models = gpu_models(run.spec.placement, world)
    journal_start(run, list(models.values()))
    if weights := run.state.initial_weights:
        log.journal.write("initial_weights", file=run.config.model.init_from, **weights._asdict())
    if warning := describe_unlike_gpus(models, "rank" if world.size > 1 else "GPU"):
        log.console.warn(warning)
    for warning in (*start.warnings, *memory_warnings):
        run.log_fault("out of memory" if warning.startswith("out of memory") else "damaged checkpoint", warning)
    if cause := read_previous_cause(world):
        run.log_fault("restart", f"attempt {world.attempt + 1} of this launch: {cause}")
    if lost := restore_best_file(run):
        run.log_fault("checkpoint", lost)
    run.observer.watchdog.start(run.progress.step, logs)
    disable_collective_timeout(world, run.strategy.groups)
    if log.console.rank_output:
        log.console.rank_output.start(logs, world.attempt)
    log.console.details(lambda: _detail_rows(run))
    if start.manifest:
        log.journal.write(
            "resume", step=run.progress.step, from_world_size=start.manifest["world_size"], world_size=world.size
        )
        if run.state.restore_warning:
            run.log_fault("resume", run.state.restore_warning)
        if not run.spec.same_length:
            log.console.note(f"the run now has {run.plan.schedule.total_steps} steps: the schedule was recomputed")


def _prepare_folder(run: Run) -> None:
    from multigpu_cli.config.yaml_text import dump_config  # late: only the rank that writes the folder needs YAML

    with fail_on_write_error(run.folder):
        rewind_run(run.spec.resume_point, run.checkpointer.store)
        (run.folder / "summary.json").unlink(missing_ok=True)  # the previous attempt's
        remove_drafts(run.folder)
        run.checkpointer.store.sweep()
        text = run.spec.factories.comment + dump_config(run.spec.user_config)
        publish(run.folder / "config.yaml", text.encode(), mode=choose_mode(run.spec.user_config.get))
    if run.log.tensorboard:
        run.log.tensorboard.plan(run.plan.rows())


def _detail_rows(run: Run) -> list[tuple[str, str]]:
    """For --verbose, what was chosen beside the plan: label and value of each line."""
    world, config, loaders = run.world, run.config, run.loaders
    parameters = list(run.state.model.parameters())
    count, trained = (sum(p.numel() for p in parameters if p.requires_grad or every) for every in (True, False))
    size = sum(p.numel() * p.element_size() for p in parameters) / 2**20
    splits = {"training": loaders.train, "validation": loaders.val, "test": loaders.test}
    samples = ", ".join(f"{loader.size:,} {name}" for name, loader in splits.items() if loader is not None)
    rows = [
        ("versions", f"torch {torch.__version__}, Python {platform.python_version()}"),
        ("model", f"{run.spec.model}: {count:,} parameters, {trained:,} trained, {size:.1f} MiB"),
        ("samples", f"{samples}; {loaders.train.data_location}; evaluated in batches of {run.eval_batch_size}"),
        ("checkpoints", f"every {config.checkpoint.every or 'epoch'}, {config.checkpoint.keep} are kept"),
    ]
    if world.size > 1:
        cap = config.communication.bucket_cap_mb
        buckets = "" if cap == "auto" else f", buckets of {float(cap):g} MiB"
        rows.append(("gradients", f"{torch.distributed.get_backend()}{buckets}"))
        first, last = log_path(run.folder / "logs", 1), log_path(run.folder / "logs", world.size - 1)
        rows.append(("other ranks", f"print to {first}" + (f" … {last.name}" if world.size > 2 else "")))
    return rows
