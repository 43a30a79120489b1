"""What a run leaves behind: journal lines, evaluations, checkpoints and the summary."""

import platform
import resource
import time
import traceback
from math import isnan
from typing import Any

import torch
from torch import Tensor, nn

from multigpu_cli.checkpoint.best import Best
from multigpu_cli.checkpoint.files import publish, sweep
from multigpu_cli.checkpoint.lock import check_ours, needed
from multigpu_cli.checkpoint.run_folder import begin_again, leave_note
from multigpu_cli.checkpoint.snapshot import Snapshot
from multigpu_cli.checkpoint.weights import host_copy, save_weights
from multigpu_cli.data.loader import Loader
from multigpu_cli.errors import OutOfMemory, TrainingError, counted
from multigpu_cli.faults.drift import check_replicas
from multigpu_cli.faults.ends import earlier_cause
from multigpu_cli.run import details, figures
from multigpu_cli.run.parts import Outcome, Run
from multigpu_cli.run.rehearsal import shrink, shrink_evaluation
from multigpu_cli.run.returning import bring_best
from multigpu_cli.runtime.collectives import decided, gathered, leave_to_watch
from multigpu_cli.runtime.devices import describe_unlike_gpus, gpu_models
from multigpu_cli.runtime.elastic import note_run
from multigpu_cli.runtime.memory import free_memory
from multigpu_cli.tasks.base import Evaluation


def open_run(run: Run, faults: list[str]) -> None:
    """Write the settings, and the first lines of this attempt, with what went wrong before it could start."""
    if run.world.local_rank == 0:
        note_run(run.world.agent, run.world.attempt, str(run.folder))
    decided(run.world, lambda: _prepare_folder(run))
    start, models = run.settled.start, gpu_models(run.choice, run.world)
    run.journal.write(
        "start",
        plan=run.plan.as_dict(),
        world_size=run.world.size,
        host=platform.node(),
        hosts=list(dict.fromkeys(run.world.hosts)),
        devices=[str(device) for device in run.choice.devices],
        gpus=list(models.values()),
        data=run.train.where,
        versions={"torch": torch.__version__, "python": platform.python_version()},
        resumed_from=start.checkpoint,
        **figures.of_the_compiler(run),
    )
    if warning := describe_unlike_gpus(models, "rank" if run.world.size > 1 else "GPU"):
        run.console.warn(warning)
    for note in start.notes:
        note_fault(run, "out of memory" if note.startswith("out of memory") else "damaged checkpoint", note)
    for fault in faults:
        note_fault(run, "out of memory", fault)
    if cause := earlier_cause(run.world):
        note_fault(run, "restart", f"attempt {run.world.attempt + 1} of this launch: {cause}")
    if lost := bring_best(run):
        note_fault(run, "checkpoint", lost)
    run.watch.begin(run.progress.step, run.folder / "logs")
    leave_to_watch(run.world)
    if run.console.aside:
        run.console.aside.begin(run.folder / "logs", run.world.attempt)
    run.console.details(lambda: details.rows(run))
    run.before = run.world.last if run.world.attempt else None
    if start.manifest:
        before = start.manifest["world_size"]
        run.journal.write("resume", step=run.progress.step, from_world_size=before, world_size=run.world.size)
        if run.resumed_without:
            note_fault(run, "resume", run.resumed_without)
        if not run.settled.same_length:
            run.console.note(f"the run now has {run.plan.schedule.total_steps} steps: the schedule was recomputed")


def _prepare_folder(run: Run) -> None:
    with needed(run.folder):
        begin_again(run.settled.start, run.store)
        (run.folder / "summary.json").unlink(missing_ok=True)  # of an attempt that has ended; this one has not
        sweep(run.folder)
        run.store.sweep()
        publish(run.folder / "config.yaml", run.settled.as_yaml().encode())
    if run.tensorboard:
        run.tensorboard.plan(run.plan.rows())


def log_step(run: Run, outcome: Outcome) -> None:
    """One `train` line: here the host waits for the numbers of the steps since the last one."""
    run.watch.at(run.progress.step, "logging")
    run.tally.read()
    rows = torch.stack(gathered(run.world, figures.mine(run, peak_memory(run.world.device)))).tolist()
    steps, rates = run.meters.steps_so_far, run.meters.read()
    progress, batches = run.progress, run.plan.batches
    fields: dict[str, Any] = {
        "step": progress.step,
        "epoch": -(-progress.step // batches.steps_per_epoch),
        "samples": run.train.samples_after(progress.step, batches),
        "loss": run.tally.last,
        "mean_loss": run.tally.mean_since_line(),
        "lr": float(run.kept.optimizer.param_groups[0]["lr"]),
        **figures.of_the_gradient(run, rows, float(outcome.norm)),
        "samples_per_second": rates["samples_per_second"],
        **run.units.rate(rates["samples_per_second"]),
        "step_ms": rates["step_ms"],
        **figures.of_all(rows, rates, steps),
        **figures.of_the_device(run, rates["samples_per_second"]),
        **run.task.told(steps * rates["step_ms"] / 1e3),
    }
    run.console.train(run.journal.write("train", **fields))
    if blank := figures.describe_new_unknowns(run, fields):
        run.console.note(blank)
    if run.writer.done:
        _hear_of_the_last(run)
    look_for_nonfinite(run)


def look_for_nonfinite(run: Run) -> None:
    """Journal the steps that were skipped since the last look.

    Raises:
        TrainingError: too many, or any with --nonfinite stop.
    """
    skipped = run.nonfinite.read()
    if not skipped:
        return
    samples = _samples_of(run, skipped[-1])
    last = f"last in step {skipped[-1] + 1}, of samples {_first(samples)}"
    text = f"{counted(len(skipped), 'step')} skipped: the gradient was NaN or infinite, {last}"
    note_fault(run, "nonfinite", text, samples=samples)
    try:
        run.nonfinite.judge(skipped)
    except TrainingError as error:
        error.problem += f", of samples {_first(samples)}"
        raise


def _samples_of(run: Run, step: int) -> list[int]:
    """The global batch of a step, by sample number: the same on every rank, without asking the others."""
    batches = run.plan.batches
    epoch, in_epoch = divmod(step, batches.steps_per_epoch)
    order = run.train.order(epoch)
    first = in_epoch * batches.global_batch
    return [int(number) for number in order[first : first + batches.samples_in(in_epoch)]]


def _first(samples: list[int]) -> str:
    return ", ".join(map(str, samples[:8])) + (" …" if len(samples) > 8 else "")


def note_fault(run: Run, kind: str, action: str, **more: Any) -> None:
    """Journal something that went wrong, and tell the user."""
    run.journal.write("fault", kind=kind, action=action, step=run.progress.step, **more)
    run.progress.faults.append({"kind": kind, "action": action, "step": run.progress.step})
    run.console.warn(f"step {run.progress.step}: {action}")


def survive_out_of_memory(run: Run, error: RuntimeError) -> None:
    """A step ran out of memory: forget it, and go on with micro-batches of half the size.

    With several processes the others are in the middle of a reduction by now, and from the optimizer on the weights may
    have moved already, in part. So the run has to start again: the next attempt finds the note that is left in the
    folder.

    Args:
        error: its traceback holds what the step had in memory, and gives it up here.

    Raises:
        TrainingError: one of these, or nothing left to halve.
    """
    moved = run.watch.phase == "optimizer"
    run.strategy.abandon()
    run.kept.optimizer.zero_grad(set_to_none=True)
    traceback.clear_frames(error.__traceback__)
    free_memory(run.world.device)
    text = shrink(run)
    if run.world.size == 1 and not moved:
        note_fault(run, "out of memory", text)
        return
    with needed(run.folder):
        run.folder.mkdir(parents=True, exist_ok=True)  # on a node that has no part of it yet
        batches = run.plan.batches
        leave_note(run.folder, {"batch_size": batches.micro_batch, "global_batch_size": batches.global_batch})
    who = f"rank {run.world.rank} ran out of memory" if run.world.size > 1 else "out of memory"
    raise TrainingError(
        f"{who}{' in the optimizer' if moved else ''} at step {run.progress.step}",
        remedy=f"run the same command again: it goes on from the last checkpoint with {text.split(': ')[1]}",
    )


def evaluate(run: Run, split: str, loader: Loader) -> Evaluation:
    """One exact pass over a split with the weights for use, journalled."""
    model, progress = run.kept.for_use(), run.progress
    moving = model.register_forward_pre_hook(lambda *_: run.watch.at(progress.step, "evaluating"))
    with run.meters.paused():
        found = _measured(run, model, loader)
        moving.remove()
        epoch = -(-progress.step // run.plan.batches.steps_per_epoch)
        entry = run.journal.write(
            "eval", epoch=epoch, step=progress.step, split=split, samples=found.samples, **found.metrics
        )
        run.console.eval(entry)
    run.progress.last |= {f"{split}_{name}": value for name, value in found.metrics.items()}
    return found


def _measured(run: Run, model: nn.Module, loader: Loader) -> Evaluation:
    """In batches that fit into every rank's memory."""
    while True:
        try:
            return run.task.evaluate(model, loader, run.world, run.precision, run.eval_batch)
        except OutOfMemory:
            text = shrink_evaluation(run)
        free_memory(run.world.device)
        note_fault(run, "out of memory", text)


def judge(run: Run) -> None:
    """At the end of an epoch: evaluate, keep the best weights, and stop early where nothing improves any more."""
    progress = run.progress
    look_for_nonfinite(run)
    run.tally.read()
    epoch = -(-progress.step // run.plan.batches.steps_per_epoch)
    if reached := run.task.enough():
        progress.stopped_early = True
        run.console.note(f"ending early: {reached}")
    last = progress.stopped_early or progress.step == run.plan.schedule.total_steps
    if run.val is None or not (last or run.task.evaluates(epoch)):
        return
    found = evaluate(run, "val", run.val)
    score = list(run.task.score(found.metrics))
    if _beats(score, progress.score):
        progress.score, progress.stale_epochs = score, 0
        named = {f"val_{name}": value for name, value in found.metrics.items()}
        progress.best = {"epoch": epoch, "step": progress.step, **found.metrics, **named}
        if run.world.main:
            with run.meters.paused():
                run.best = host_copy(run.kept.for_use().state_dict())
    elif progress.best:
        progress.stale_epochs += 1
        if run.config.length.patience and progress.stale_epochs >= run.config.length.patience:
            progress.stopped_early = True
            run.console.note(f"stopping early: no improvement in {progress.stale_epochs} epochs")


def _beats(score: list[float], best: list[float]) -> bool:
    """Whether a score is the greatest so far: one with NaN in it never is, and any other beats it."""
    return not any(map(isnan, score)) and (not best or any(map(isnan, best)) or score > best)


def save(run: Run) -> None:
    """Copy what must survive, and have it written while training goes on; rank 0 does, the others have nothing more.

    best.pt is written with it, before the checkpoint is published: it is never behind what the checkpoint says.
    """
    run.watch.at(run.progress.step, "saving")
    run.saved = run.progress.step
    with run.meters.paused():
        run.tally.read()
        check_replicas(run.kept.model, run.world, run.progress.step, run.kept.optimizer)
        more = run.task.state(run.world)
        if not run.world.main:
            return
        began = time.perf_counter()
        _hear_of_the_last(run)
        step, best, snapshot = run.progress.step, run.best, _captured(run, more)
        best_metrics, run.best_sent = dict(run.progress.best), best
        stalled = time.perf_counter() - began

        def write() -> None:
            check_ours(run.folder)
            weights = run.folder / "best.pt"
            if best is not None:
                run.best_sum = save_weights(weights, best, run.settled.label(), best_metrics, run.watch.moved)
            facts = run.settled.facts() | {"world_size": run.world.size, "versions": {"torch": torch.__version__}}
            so_far = Best(weights, run.best_sum) if best_metrics else None
            size = run.store.save(step, snapshot.state, facts, so_far)
            seconds = time.perf_counter() - began
            stall = stalled + run.writer.waited
            run.journal.write("checkpoint", step=step, seconds=seconds, stall_seconds=stall, bytes=size)
            run.console.detail(
                f"checkpoint of step {step}: {size / 2**20:.1f} MiB in {seconds:.2f} s, stall {stall:.3f} s"
            )

        run.writer.submit(snapshot.finish, write)
        stalled = time.perf_counter() - began


def _hear_of_the_last(run: Run) -> None:
    """Wait for the checkpoint before; what could not be written is written with the next one."""
    if error := run.writer.settle():
        note_fault(run, "checkpoint", f"a checkpoint was not written ({error}); the next one is tried as planned")
    elif run.best is run.best_sent:
        run.best = None
    run.best_sent = None


def _captured(run: Run, task: dict[str, Any]) -> Snapshot:
    """The state for a checkpoint, with the seconds of this attempt in its totals; the last one has been written."""
    live = run.progress
    before, live.train_seconds = live.train_seconds, live.train_seconds + run.meters.seconds
    snapshot = run.kept.begin_capture(run.snapshot, task)
    run.snapshot, live.train_seconds = snapshot.state, before
    return snapshot


def settle_writes(run: Run) -> None:
    """Wait for the last checkpoint.

    Raises:
        TrainingError: it could not be written; earlier ones are as they were.
    """
    if error := run.writer.settle():
        raise TrainingError(
            f"the last checkpoint could not be written to {run.folder}: {error}",
            remedy="make room, or mend the folder, and run the same command again: it goes on from the one before",
        )


def peak_memory_here(run: Run) -> Tensor:
    """(1,) int64, to be gathered."""
    return torch.tensor([peak_memory(run.world.device)], device=run.world.device)


def peak_memory(device: torch.device) -> int:
    """Bytes: of the GPU's allocator, or of this process where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024
