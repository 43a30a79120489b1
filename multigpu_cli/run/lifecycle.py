"""A run from its request to its summary: opened, failed and closed in one place, for command line and API alike."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from multigpu_cli.checkpoint.lock import fail_on_write_error, lock_folder
from multigpu_cli.checkpoint.store import Store
from multigpu_cli.checkpoint.writer import Writer
from multigpu_cli.config.schema import Config
from multigpu_cli.errors import TrainingError
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
from multigpu_cli.run.run_state import Run, RunControl, RunLog
from multigpu_cli.run.spec import RunSpec, resolve_spec
from multigpu_cli.run.start_run import start_run
from multigpu_cli.run.step_observer import StepObserver
from multigpu_cli.run.user_objects import UserObjects
from multigpu_cli.runtime.collectives import run_on_all_ranks, run_on_main_rank
from multigpu_cli.runtime.determinism import enable_determinism, enable_fast_kernels
from multigpu_cli.runtime.placement import Placement
from multigpu_cli.runtime.world import LaunchEnv, World, process_group

if TYPE_CHECKING:
    from multigpu_cli.monitor.gpu import Sampler
    from multigpu_cli.monitor.tensorboard import TensorBoard


class ResolvedRequest(NamedTuple):
    """A request that all ranks have resolved, with the signal handler and the watchdog that are active.

    Attributes:
        began: time.perf_counter at the beginning.
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
    user_objects: UserObjects | None,
) -> Iterator[ResolvedRequest]:
    """Form the process group, for as long as the context lasts, and resolve the request on all ranks.

    Raises:
        RequestError: it can't be carried out; nothing was written.
    """
    began = time.perf_counter()
    timeout = placement.timeout or max(LONG, config.fault.hang_timeout)
    with (
        process_group(launch_env, placement.devices[0], timeout=timeout, backend=placement.backend) as world,
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
    """Build the components, probe the memory, and lock the run folder for as long as the context lasts.

    A summary is written however the run ends: by `finish_run`, by `record_failure`, or else here, as stopped.

    Raises:
        RequestError: model, data and device do not fit; nothing was written.
        TrainingError: the run failed.
    """
    spec, world, stop, watchdog, console, began = request
    with ExitStack() as stack:
        components = build_components(spec, world)
        memory_warnings = probe_memory(components)
        console.plan(components.plan.rows(), "Plan")
        run_on_main_rank(world, lambda: stack.enter_context(lock_folder(Path(spec.start.folder))))
        run = assemble_run(components, console, stop, watchdog, stack)
        run.progress.startup_seconds += time.perf_counter() - began
        with record_failure(run):
            start_run(run, memory_warnings)
            yield run
        if not run.control.summary_written:
            run.checkpointer.writer.wait()
            close_run(run, build_summary(run, "stopped", {}))


@contextmanager
def record_failure(run: Run) -> Iterator[None]:
    """End the run on an error inside, or a hang: write the reason into its summary, and raise the root cause."""

    def failed(error: BaseException) -> None:
        if run.control.summary_written:
            return
        summary = finish_failed(run, error)
        if run.world.restarts_left <= 0:  # no restart follows: --json prints this summary
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
    """Open journal, TensorBoard and the rest in the run folder, which this process group has locked.

    Args:
        stack: closes what is opened here.
    """
    world, config, plan, progress = components.world, components.config, components.plan, components.progress
    folder = Path(components.spec.start.folder)
    board = _open_board(folder, console, stack) if world.is_main else None

    def open_files() -> tuple[Journal, SampleTrace | None]:
        with fail_on_write_error(folder):
            path = folder / "journal.jsonl" if world.is_main else None
            journal = stack.enter_context(Journal(path, [board] if board else [], console.warn))
            if not config.log.trace_samples:
                return journal, None
            trace = SampleTrace(folder / "samples.jsonl", world, plan.batches.global_batch, console.warn)
            return journal, stack.enter_context(trace)

    journal, trace = run_on_all_ranks(world, open_files)
    components.task.moved = watchdog.mark_progress
    stack.callback(components.loaders.close)
    progress_bar = stack.enter_context(closing(console.progress(plan.schedule.total_steps, progress.step)))
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
            LossMeter(world, progress, plan.batches.steps_per_epoch),
            trace,
        ),
        checkpointer=Checkpointer(store, writer, CheckpointSchedule(config.checkpoint), progress.step),
        log=RunLog(journal, board, console, progress_bar, _watch_gpu(world.device, stack), _count_flops(components)),
        control=RunControl(stop, StopConsensus(world), world.previous_attempt if world.attempt else None),
    )


def _open_board(folder: Path, console: Console, stack: ExitStack) -> "TensorBoard":
    from multigpu_cli.monitor.tensorboard import TensorBoard  # late: rank 0 alone has one

    return stack.enter_context(TensorBoard(folder / "tensorboard", console.warn))


def _watch_gpu(device: torch.device, stack: ExitStack) -> "Sampler | None":
    """Start sampling this rank's GPU, if it has one."""
    if device.type != "cuda":
        return None
    from multigpu_cli.monitor.gpu import Sampler  # late: not for a CPU

    return stack.enter_context(closing(Sampler(str(torch.cuda.get_device_properties(device).uuid))))


def _count_flops(components: TrainComponents) -> float | None:
    """FLOPs of a sample, where the device's peak rate is known; counting costs a forward and backward pass."""
    if peak_flops(components.plan.device, components.state.precision.name) is None:
        return None
    from multigpu_cli.run.micro_batch_cost import profile_micro_batch  # late: it loads torch's counter

    return profile_micro_batch(components, components.plan.batches.micro_batch).flops_per_sample
