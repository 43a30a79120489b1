"""Assembles the Run: its components with observer, checkpointer, journal and stop control."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from multigpu_cli.checkpoint.lock import fail_on_write_error
from multigpu_cli.checkpoint.store import Store
from multigpu_cli.checkpoint.writer import Writer
from multigpu_cli.faults.skipped_step_limit import SkippedStepLimit
from multigpu_cli.faults.stop import StopConsensus, StopRequest
from multigpu_cli.faults.watchdog import Watchdog
from multigpu_cli.monitor.console import Console
from multigpu_cli.monitor.journal import Journal
from multigpu_cli.monitor.meters import StepTimer
from multigpu_cli.monitor.noise_scale import NoiseMeter
from multigpu_cli.monitor.sample_trace import SampleTrace
from multigpu_cli.planning.peak_flops import peak_flops
from multigpu_cli.run.components import TrainComponents
from multigpu_cli.run.loss_meter import LossMeter
from multigpu_cli.run.part import Part, bind_moments
from multigpu_cli.run.run import Checkpointer, CheckpointSchedule, Run, RunControl, RunLog
from multigpu_cli.run.sharded_save import agree_on_owner
from multigpu_cli.run.step_observer import StepObserver
from multigpu_cli.runtime.collectives import all_reduce_max
from multigpu_cli.runtime.raise_on_all_ranks import run_on_all_ranks

if TYPE_CHECKING:
    from multigpu_cli.monitor.gpu_sampler import Sampler
    from multigpu_cli.monitor.tensorboard import TensorBoard


def assemble_run(
    components: TrainComponents,
    console: Console,
    stop: StopRequest,
    watchdog: Watchdog,
    stack: ExitStack,
    parts: Sequence[Part] = (),
) -> Run:
    """Open journal, TensorBoard and the rest in the run folder, which this process group has locked.

    Args:
        stack: closes what is opened here.
        parts: see what happens in the run.
    """
    world, config, plan, progress = components.world, components.config, components.plan, components.progress
    folder = Path(components.spec.resume_point.folder)
    board = _open_board(folder, console, stack) if world.is_main else None
    followers = [part.follow_journal(components, console, watchdog, stack) for part in parts if world.is_main]

    def open_files() -> tuple[Journal, SampleTrace | None]:
        with fail_on_write_error(folder):
            path = folder / "journal.jsonl" if world.is_main else None
            listeners = [each for each in (board, *followers) if each]
            journal = stack.enter_context(Journal(path, listeners, console.warn))
            if not config.log.trace_samples:
                return journal, None
            trace = SampleTrace(folder / "samples.jsonl", world, plan.batches.global_batch, console.warn)
            return journal, stack.enter_context(trace)

    journal, trace = run_on_all_ranks(world, open_files)
    components.task.moved, components.strategy.arrived = watchdog.mark_progress, watchdog.count_arrival
    progress_bar = stack.enter_context(closing(console.progress(plan.schedule.total_steps, progress.step)))
    fp16 = components.state.precision.name == "fp16"
    store = Store(folder / "checkpoints", config.checkpoint.keep, watchdog.mark_progress)
    writer = stack.enter_context(Writer())
    owner = agree_on_owner(world, folder) if components.strategy.sharded else ""
    if components.strategy.sharded and not owner:
        console.note(f"not all workers see {folder}: worker 0 gathers what the checkpoints hold, and writes them alone")
    return Run(
        **{each.name: getattr(components, each.name) for each in fields(TrainComponents)},
        observer=StepObserver(
            watchdog,
            StepTimer(device_runs_ahead=world.device.type == "cuda"),
            NoiseMeter(0 if fp16 else config.log.interval, components.strategy.loss_factor),
            SkippedStepLimit(config.fault.nonfinite, world.device, fp16=fp16),
            LossMeter(world, progress, plan.batches.steps_per_epoch),
            trace,
        ),
        checkpointer=Checkpointer(store, writer, CheckpointSchedule(config.checkpoint), progress.step, owner=owner),
        log=RunLog(journal, board, console, progress_bar, _watch_gpu(world.device, stack), _count_flops(components)),
        control=RunControl(stop, StopConsensus(world), world.previous_attempt if world.attempt else None),
        moments=bind_moments(parts),
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
    """FLOPs of a sample, where some device's peak rate is known; counting costs a forward and backward pass."""
    known = peak_flops(components.plan.device, components.state.precision.name) is not None
    if not all_reduce_max(components.world, [known])[0]:  # all ranks count or none, since the passes may communicate
        return None
    from multigpu_cli.run.profile_micro_batch import count_flops_per_sample  # late: it loads torch's counter

    return count_flops_per_sample(components, components.plan.batches.micro_batch)
