"""A run from its request to its summary: opened, failed and closed in one place, for command line and API alike."""

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from multigpu_cli.checkpoint.files import publish, remove_drafts
from multigpu_cli.checkpoint.lock import fail_on_write_error, lock_folder
from multigpu_cli.checkpoint.run_folder import rewind_run
from multigpu_cli.checkpoint.store import Store
from multigpu_cli.checkpoint.writer import Writer
from multigpu_cli.config.schema import Config
from multigpu_cli.errors import TrainingError, pluralize
from multigpu_cli.faults.rank_failures import read_previous_cause
from multigpu_cli.faults.skipped_steps import NonfiniteGuard
from multigpu_cli.faults.stop import StopConsensus, StopRequest
from multigpu_cli.faults.watchdog import LONG, Watchdog
from multigpu_cli.monitor.console import Console
from multigpu_cli.monitor.journal import Journal
from multigpu_cli.monitor.meters import StepTimer
from multigpu_cli.monitor.noise_scale import NoiseMeter
from multigpu_cli.monitor.sample_trace import SampleTrace
from multigpu_cli.planning.peak_flops import peak_flops
from multigpu_cli.run.batch_size_finder import probe_memory
from multigpu_cli.run.build import TrainComponents, build_components
from multigpu_cli.run.checkpointing import Checkpointer, CheckpointSchedule
from multigpu_cli.run.finalize import build_summary, close_run, finish_failed, name_unused_parameters
from multigpu_cli.run.loss_meter import LossMeter
from multigpu_cli.run.resume_point import restore_best_weights
from multigpu_cli.run.run_state import Run, RunControl, RunLog
from multigpu_cli.run.spec import RunSpec, resolve_spec
from multigpu_cli.run.step_observer import StepObserver
from multigpu_cli.run.train_log import compiler_fields
from multigpu_cli.runtime.collectives import disable_collective_timeout, run_on_all_ranks, run_on_main_rank
from multigpu_cli.runtime.determinism import enable_determinism, enable_fast_kernels
from multigpu_cli.runtime.placement import Placement, describe_unlike_gpus, gpu_models
from multigpu_cli.runtime.rank_output import log_path
from multigpu_cli.runtime.restart_records import record_run
from multigpu_cli.runtime.world import LaunchEnv, World, process_group

if TYPE_CHECKING:
    from multigpu_cli.monitor.gpu_sampler import Sampler
    from multigpu_cli.monitor.tensorboard import TensorBoard
    from multigpu_cli.run.user_objects import UserObjects


class ResolvedRequest(NamedTuple):
    """A request that all ranks have resolved, with the signal handler and the watchdog that run meanwhile.

    Attributes:
        began: when, by time.perf_counter.
    """

    spec: RunSpec
    world: World
    stop: StopRequest
    watchdog: Watchdog
    console: Console
    began: float


@contextmanager
def resolve_request(
    config: Config,
    placement: Placement,
    launch_env: LaunchEnv | None,
    console: Console,
    on_fatal_error: Callable[[TrainingError], None],
    user_objects: "UserObjects | None",
) -> Iterator[ResolvedRequest]:
    """Form the process group, for as long as the context lasts, and resolve the request on all ranks.

    Raises:
        RequestError: it can't be carried out; nothing was written.
    """
    began = time.perf_counter()
    patience = placement.timeout or max(LONG, config.fault.hang_timeout)
    with (
        process_group(launch_env, placement.devices[0], timeout=patience, backend=placement.backend) as world,
        StopRequest() as stop,
        Watchdog(world, config.fault.hang_timeout, on_fatal_error) as watchdog,
    ):
        spec = resolve_spec(config, placement, world, user_objects=user_objects)
        if spec.config.reproducibility.exact:
            enable_determinism()
        else:
            enable_fast_kernels(world.device)
        yield ResolvedRequest(spec, world, stop, watchdog, console, began)


@contextmanager
def open_run(request: ResolvedRequest) -> Iterator[Run]:
    """Build the components, probe the memory, and own the run folder for as long as the context lasts.

    The run leaves a summary whichever way it ends: as `finish_run` says, as `record_failure` does, or else as stopped.

    Raises:
        RequestError: model, data and device do not fit; nothing was written.
        TrainingError: the run failed.
    """
    spec, world, stop, watchdog, console, began = request
    with ExitStack() as stack:
        components = build_components(spec, world)
        notes = probe_memory(components)
        console.plan(components.plan.rows(), "Plan")
        run_on_main_rank(world, lambda: stack.enter_context(lock_folder(Path(spec.start.folder))))
        run = assemble_run(components, console, stop, watchdog, stack)
        run.progress.startup_seconds += time.perf_counter() - began
        with record_failure(run):
            start_run(run, notes)
            yield run
        if not run.control.summary_written:
            run.checkpointer.writer.wait()
            close_run(run, build_summary(run, "stopped", {}))


@contextmanager
def record_failure(run: Run) -> Iterator[None]:
    """An error inside, or a hang, ends the run: its summary says why, and what caused it is raised."""

    def failed(error: BaseException) -> None:
        if run.control.summary_written:
            return
        summary = finish_failed(run, error)
        if run.world.restarts_left <= 0:  # nobody starts it again: this summary is the one that --json prints
            run.log.console.print_json(summary)

    run.observer.watchdog.on_end = failed
    try:
        yield
    except BaseException as error:
        name_unused_parameters(run, error)
        reason = run.observer.watchdog.root_cause(error)
        failed(reason)
        raise reason from (None if reason is error else error)


def assemble_run(
    components: TrainComponents, console: Console, stop: StopRequest, watchdog: Watchdog, stack: ExitStack
) -> Run:
    """Open journal, TensorBoard and the rest in the run folder, which is already ours; the stack closes them."""
    world, config, plan = components.world, components.config, components.plan
    folder = Path(components.spec.start.folder)
    board = _open_board(folder, console, stack) if world.is_main else None

    def open_files() -> tuple[Journal, SampleTrace | None]:
        with fail_on_write_error(folder):
            journal = Journal(
                folder / "journal.jsonl" if world.is_main else None, [board] if board else [], console.warn
            )
            if not config.log.trace_samples:
                return journal, None
            return journal, SampleTrace(folder / "samples.jsonl", world, plan.batches.global_batch, console.warn)

    journal, trace = run_on_all_ranks(world, open_files)
    components.task.moved = watchdog.mark_progress
    if trace:
        stack.enter_context(trace)
    stack.callback(components.loaders.close)
    stack.enter_context(journal)
    bar = console.progress(plan.schedule.total_steps, components.progress.step)
    stack.callback(bar.close)
    fp16 = components.state.precision.name == "fp16"
    store = Store(folder / "checkpoints", config.checkpoint.keep, watchdog.mark_progress)
    writer = stack.enter_context(Writer())
    return Run(
        **{each.name: getattr(components, each.name) for each in fields(TrainComponents)},
        observer=StepObserver(
            watchdog,
            StepTimer(device_runs_ahead=world.device.type == "cuda"),
            NoiseMeter(0 if fp16 else config.log.interval, components.strategy.loss_factor),
            NonfiniteGuard(config.fault.nonfinite, world.device, fp16=fp16),
            LossMeter(world, components.progress, plan.batches.steps_per_epoch),
            trace,
        ),
        checkpointer=Checkpointer(store, writer, CheckpointSchedule(config.checkpoint), components.progress.step),
        log=RunLog(journal, board, console, bar, _watch_gpu(world.device, stack), _count_flops(components)),
        control=RunControl(stop, StopConsensus(world), world.previous_attempt if world.attempt else None),
    )


def _open_board(folder: Path, console: Console, stack: ExitStack) -> "TensorBoard":
    from multigpu_cli.monitor.tensorboard import TensorBoard  # late: the first rank alone has one

    return stack.enter_context(TensorBoard(folder / "tensorboard", console.warn))


def _watch_gpu(device: torch.device, stack: ExitStack) -> "Sampler | None":
    """Somebody who watches this rank's GPU."""
    if device.type != "cuda":
        return None
    from multigpu_cli.monitor.gpu_sampler import Sampler  # late: there is a GPU to watch

    sampler = Sampler(str(torch.cuda.get_device_properties(device).uuid))
    stack.callback(sampler.close)
    return sampler


def _count_flops(components: TrainComponents) -> float | None:
    """Counted where something can be made of them; it costs a forward and backward pass."""
    if peak_flops(components.plan.device, components.state.precision.name) is None:
        return None
    from multigpu_cli.run.micro_batch_cost import (
        profile_micro_batch,  # late: torch's counter is needed on a known GPU only
    )

    return profile_micro_batch(components, components.plan.batches.micro_batch).flops_per_sample


def start_run(run: Run, faults: list[str]) -> None:
    """Write the settings, and the first lines of this attempt, with what went wrong before it could start."""
    if run.world.local_rank == 0:
        record_run(run.world.agent_dir, run.world.attempt, str(run.folder))
    run_on_main_rank(run.world, lambda: _prepare_folder(run))
    start, models = run.spec.start, gpu_models(run.spec.placement, run.world)
    run.log.journal.write(
        "start",
        plan=run.plan.as_dict(),
        world_size=run.world.size,
        host=platform.node(),
        hosts=list(dict.fromkeys(run.world.hosts)),
        devices=[str(device) for device in run.spec.placement.devices],
        gpus=list(models.values()),
        data=run.loaders.train.where,
        versions={"torch": torch.__version__, "python": platform.python_version()},
        resumed_from=start.checkpoint,
        **compiler_fields(run),
    )
    if warning := describe_unlike_gpus(models, "rank" if run.world.size > 1 else "GPU"):
        run.log.console.warn(warning)
    for note in start.warnings:
        run.log_fault("out of memory" if note.startswith("out of memory") else "damaged checkpoint", note)
    for fault in faults:
        run.log_fault("out of memory", fault)
    if cause := read_previous_cause(run.world):
        run.log_fault("restart", f"attempt {run.world.attempt + 1} of this launch: {cause}")
    if lost := restore_best_weights(run):
        run.log_fault("checkpoint", lost)
    run.observer.watchdog.start(run.progress.step, run.folder / "logs")
    disable_collective_timeout(run.world)
    if run.log.console.rank_output:
        run.log.console.rank_output.start(run.folder / "logs", run.world.attempt)
    run.log.console.details(lambda: _detail_rows(run))
    if start.manifest:
        before = start.manifest["world_size"]
        run.log.journal.write("resume", step=run.progress.step, from_world_size=before, world_size=run.world.size)
        if run.state.restore_warning:
            run.log_fault("resume", run.state.restore_warning)
        if not run.spec.same_length:
            run.log.console.note(f"the run now has {run.plan.schedule.total_steps} steps: the schedule was recomputed")


def _prepare_folder(run: Run) -> None:
    with fail_on_write_error(run.folder):
        rewind_run(run.spec.start, run.checkpointer.store)
        (run.folder / "summary.json").unlink(missing_ok=True)  # of an attempt that has ended; this one has not
        remove_drafts(run.folder)
        run.checkpointer.store.sweep()
        publish(run.folder / "config.yaml", run.spec.as_yaml().encode())
    if run.log.tensorboard:
        run.log.tensorboard.plan(run.plan.rows())


def _detail_rows(run: Run) -> list[tuple[str, str]]:
    """For --verbose, what was chosen beside the plan: label and value of each line."""
    spec, world, config = run.spec, run.world, run.config
    parameters = list(run.state.model.parameters())
    trained = sum(each.numel() for each in run.trainable_parameters)
    count = sum(each.numel() for each in parameters)
    size = sum(each.numel() * each.element_size() for each in parameters) / 2**20
    loaders = run.loaders
    splits = {"training": loaders.train, "validation": loaders.val, "test": loaders.test}
    samples = ", ".join(f"{loader.size:,} {name}" for name, loader in splits.items() if loader is not None)
    rows = [
        ("versions", f"torch {torch.__version__}, Python {platform.python_version()}"),
        ("model", f"{spec.model}: {count:,} parameters, {trained:,} trained, {size:.1f} MiB"),
        ("samples", f"{samples}; {run.loaders.train.where}; evaluated in batches of {run.eval_batch}"),
        ("optimizer", f"{type(run.state.optimizer).__name__}, {pluralize(len(run.trainable_parameters), 'tensor')}"),
        ("checkpoints", f"every {config.checkpoint.every or 'epoch'}, {config.checkpoint.keep} are kept"),
    ]
    if world.size > 1:
        cap = config.communication.bucket_cap_mb
        buckets = f", buckets of {cap:g} MiB" if isinstance(cap, (int, float)) else ""
        rows.append(("gradients", f"{torch.distributed.get_backend()}{buckets}"))
        first, last = log_path(run.folder / "logs", 1), log_path(run.folder / "logs", world.size - 1)
        rows.append(("other ranks", f"print to {first}" + (f" … {last.name}" if world.size > 2 else "")))
    return rows
