"""Starts a run in its folder: assembles the Run, writes the settings and the journal's first lines."""

import platform
from contextlib import ExitStack, closing
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from multigpu_cli.checkpoint.files import publish, remove_drafts
from multigpu_cli.checkpoint.lock import fail_on_write_error
from multigpu_cli.checkpoint.run_folder import rewind_run
from multigpu_cli.checkpoint.store import Store
from multigpu_cli.checkpoint.writer import Writer
from multigpu_cli.errors import pluralize
from multigpu_cli.faults.nonfinite_guard import NonfiniteGuard
from multigpu_cli.faults.rank_status import read_previous_cause
from multigpu_cli.faults.stop import StopConsensus, StopRequest
from multigpu_cli.faults.watchdog import Watchdog
from multigpu_cli.monitor.console import Console
from multigpu_cli.monitor.journal import Journal
from multigpu_cli.monitor.meters import StepTimer
from multigpu_cli.monitor.noise_scale import NoiseMeter
from multigpu_cli.monitor.sample_trace import SampleTrace
from multigpu_cli.planning.peak_flops import peak_flops
from multigpu_cli.run.checkpointing import Checkpointer, CheckpointSchedule
from multigpu_cli.run.components import TrainComponents
from multigpu_cli.run.loss_meter import LossMeter
from multigpu_cli.run.restore_best_file import restore_best_file
from multigpu_cli.run.run_context import Run, RunControl, RunLog
from multigpu_cli.run.step_observer import StepObserver
from multigpu_cli.run.train_log import compiler_fields
from multigpu_cli.runtime.choose_strategy_and_devices import describe_unlike_gpus, gpu_models
from multigpu_cli.runtime.collectives import disable_collective_timeout
from multigpu_cli.runtime.raise_on_all_ranks import run_on_all_ranks, run_on_main_rank
from multigpu_cli.runtime.rank_output import log_path
from multigpu_cli.runtime.restart_records import record_run

if TYPE_CHECKING:
    from multigpu_cli.monitor.gpu_sampler import Sampler
    from multigpu_cli.monitor.tensorboard import TensorBoard


def assemble_run(
    components: TrainComponents, console: Console, stop: StopRequest, watchdog: Watchdog, stack: ExitStack
) -> Run:
    """Open journal, TensorBoard and the rest in the run folder, which this process group has locked.

    Args:
        stack: closes what is opened here.
    """
    world, config, plan, progress = components.world, components.config, components.plan, components.progress
    folder = Path(components.spec.resume_point.folder)
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
    from multigpu_cli.monitor.gpu_sampler import Sampler

    return stack.enter_context(closing(Sampler(str(torch.cuda.get_device_properties(device).uuid))))


def _count_flops(components: TrainComponents) -> float | None:
    """FLOPs of a sample, where the device's peak rate is known; counting costs a forward and backward pass."""
    if peak_flops(components.plan.device, components.state.precision.name) is None:
        return None
    from multigpu_cli.run.micro_batch_flops_and_memory import profile_micro_batch  # late: it loads torch's counter

    return profile_micro_batch(components, components.plan.batches.micro_batch).flops_per_sample


def start_run(run: Run, memory_warnings: list[str]) -> None:
    """Write the settings and the first lines of this attempt, with the faults that came before it.

    Args:
        memory_warnings: from `fit_batch_sizes_to_memory`.
    """
    world, start, log, logs = run.world, run.spec.resume_point, run.log, run.folder / "logs"
    if world.local_rank == 0:
        record_run(world.agent_dir, world.attempt, str(run.folder))
    run_on_main_rank(world, lambda: _prepare_folder(run))
    models = gpu_models(run.spec.placement, world)
    log.journal.write(
        "start",
        plan=run.plan.as_dict(),
        world_size=world.size,
        host=platform.node(),
        hosts=list(dict.fromkeys(world.hosts)),
        devices=[str(device) for device in run.spec.placement.devices],
        gpus=list(models.values()),
        data=run.loaders.train.data_location,
        versions={"torch": torch.__version__, "python": platform.python_version()},
        resumed_from=start.checkpoint,
        **compiler_fields(run),
    )
    if weights := run.state.initial_weights:
        log.journal.write("initial_weights", file=run.config.model.init_from, **weights._asdict())
    if warning := describe_unlike_gpus(models, "rank" if world.size > 1 else "GPU"):
        log.console.warn(warning)
    for warning in start.warnings:
        run.log_fault("out of memory" if warning.startswith("out of memory") else "damaged checkpoint", warning)
    for warning in memory_warnings:
        run.log_fault("out of memory", warning)
    if cause := read_previous_cause(world):
        run.log_fault("restart", f"attempt {world.attempt + 1} of this launch: {cause}")
    if lost := restore_best_file(run):
        run.log_fault("checkpoint", lost)
    run.observer.watchdog.start(run.progress.step, logs)
    disable_collective_timeout(world)
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
    with fail_on_write_error(run.folder):
        rewind_run(run.spec.resume_point, run.checkpointer.store)
        (run.folder / "summary.json").unlink(missing_ok=True)  # the previous attempt's
        remove_drafts(run.folder)
        run.checkpointer.store.sweep()
        publish(run.folder / "config.yaml", run.spec.as_yaml().encode())
    if run.log.tensorboard:
        run.log.tensorboard.plan(run.plan.rows())


def _detail_rows(run: Run) -> list[tuple[str, str]]:
    """For --verbose, what was chosen beside the plan: label and value of each line."""
    world, config, loaders = run.world, run.config, run.loaders
    parameters = list(run.state.model.parameters())
    count, trained = (sum(p.numel() for p in group) for group in (parameters, run.trainable_parameters))
    size = sum(p.numel() * p.element_size() for p in parameters) / 2**20
    splits = {"training": loaders.train, "validation": loaders.val, "test": loaders.test}
    samples = ", ".join(f"{loader.size:,} {name}" for name, loader in splits.items() if loader is not None)
    rows = [
        ("versions", f"torch {torch.__version__}, Python {platform.python_version()}"),
        ("model", f"{run.spec.model}: {count:,} parameters, {trained:,} trained, {size:.1f} MiB"),
        ("samples", f"{samples}; {loaders.train.data_location}; evaluated in batches of {run.eval_batch_size}"),
        ("optimizer", f"{type(run.state.optimizer).__name__}, {pluralize(len(run.trainable_parameters), 'tensor')}"),
        ("checkpoints", f"every {config.checkpoint.every or 'epoch'}, {config.checkpoint.keep} are kept"),
    ]
    if world.size > 1:
        cap = config.communication.bucket_cap_mb
        buckets = "" if cap == "auto" else f", buckets of {float(cap):g} MiB"
        rows.append(("gradients", f"{torch.distributed.get_backend()}{buckets}"))
        first, last = log_path(run.folder / "logs", 1), log_path(run.folder / "logs", world.size - 1)
        rows.append(("other ranks", f"print to {first}" + (f" … {last.name}" if world.size > 2 else "")))
    return rows
