"""Opens a run from its request, and closes it, also after a failure: for command line and Python API."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from multigpu_cli.capabilities import PART_STATES
from multigpu_cli.checkpoint.lock import check_unlocked, lock_folder
from multigpu_cli.config.schema import Config
from multigpu_cli.errors import TrainingError, pluralize
from multigpu_cli.faults.stop import StopRequest
from multigpu_cli.faults.watchdog import STARTUP_TIMEOUT, Watchdog
from multigpu_cli.monitor.console import Console
from multigpu_cli.run.assemble_run import assemble_run
from multigpu_cli.run.build_components import build_components
from multigpu_cli.run.components import TrainComponents
from multigpu_cli.run.describe_learning_rates import describe_groups
from multigpu_cli.run.finalize import finish_failed, name_unused_parameters
from multigpu_cli.run.fit_batch_sizes_to_memory import fit_batch_sizes_to_memory, try_micro_batch
from multigpu_cli.run.part import Part, load_parts
from multigpu_cli.run.prepare_spec import prepare_spec
from multigpu_cli.run.run import Run
from multigpu_cli.run.spec import RunSpec
from multigpu_cli.run.start_run import start_run
from multigpu_cli.run.summary import build_summary, write_run_end
from multigpu_cli.runtime.choose_strategy_and_devices import Placement
from multigpu_cli.runtime.launch_env import LaunchEnv
from multigpu_cli.runtime.model_call import unbind_call
from multigpu_cli.runtime.process_group import process_group
from multigpu_cli.runtime.raise_on_all_ranks import run_on_main_rank
from multigpu_cli.runtime.torch_settings import enable_determinism, enable_fast_kernels
from multigpu_cli.runtime.world import World

if TYPE_CHECKING:
    from multigpu_cli.run.user_objects import UserObjects


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
    parts: list[Part]


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
    timeout = placement.timeout or max(STARTUP_TIMEOUT, config.fault.hang_timeout)
    with (
        process_group(launch_env, placement.devices[0], timeout=timeout, backend=placement.backend) as world,
        StopRequest() as stop,
        Watchdog(world, config.fault.hang_timeout, on_fatal_error) as watchdog,
    ):
        spec = prepare_spec(
            config, placement, world, user_objects=user_objects, moved=watchdog.mark_progress, note=console.note
        )
        if spec.config.reproducibility.exact:
            enable_determinism()
        else:
            enable_fast_kernels(world.device)
        for warning in spec.source.warnings:
            console.warn(warning)
        parts = [] if spec.is_complete else load_parts(spec, world)
        yield ResolvedRequest(spec, world, stop, watchdog, console, began, parts)


def try_request(request: ResolvedRequest) -> dict[str, Any]:
    """Build the components as `open_run` does, try a micro-batch, and show the plan; nothing is written.

    Returns:
        The plan, and what was tried.

    Raises:
        RequestError: the run would refuse the same.
        TrainingError: the run would fail before its first step.
    """
    spec, world, console = request.spec, request.world, request.console
    plan, tried, components = spec.plan, "nothing: the run is complete", None
    if not spec.is_complete:
        run_on_main_rank(world, lambda: check_unlocked(Path(spec.resume_point.folder)))
        components = build_components(spec, world, request.parts)
        with closing(components.loaders):
            samples, memory_warnings = try_micro_batch(components)
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

    Raises:
        RequestError: model, data and device do not fit; nothing was written.
        TrainingError: the run failed.
    """
    spec, world, stop, watchdog, console, began, parts = request
    with ExitStack() as stack:
        if spec.user_objects:
            stack.callback(unbind_call, spec.user_objects.model)
        components = build_components(spec, world, parts)
        stack.callback(components.loaders.close)
        memory_warnings = fit_batch_sizes_to_memory(components)
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
            run.checkpointer.writer.wait()
            write_run_end(run, build_summary(run, "stopped", {}))


def _show_model_tables(components: TrainComponents, console: Console) -> None:
    """Show beside the plan the learning rates of parts of the model, and where its first weights come from."""
    if groups := describe_groups(components):
        console.plan(groups, "Learning rates")
    if weights := components.state.initial_weights:
        console.plan(weights.rows(), f"Weights from {components.config.model.init_from}")


@contextmanager
def record_failure(run: Run) -> Iterator[None]:
    """End the run on an error inside, or a hang: write the reason into its summary, and raise the root cause."""

    def failed(error: BaseException) -> None:
        if run.control.summary_written:
            return
        summary = finish_failed(run, error)
        if run.world.restarts_left <= 0:  # no restart follows: --json prints this summary
            run.log.console.print_json(summary)

    run.observer.watchdog.before_fatal_exit = failed
    try:
        yield
    except BaseException as error:
        name_unused_parameters(run, error)
        reason = run.observer.watchdog.publish_and_find_root_cause(error)
        failed(reason)
        raise reason from (None if reason is error else error)
