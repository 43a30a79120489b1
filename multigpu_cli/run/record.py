"""What a run leaves behind: journal lines, evaluations, checkpoints and the summary."""

import platform
import resource
import time
from math import fsum
from typing import Any

import torch
from torch import Tensor

from multigpu_cli.checkpoint.files import publish
from multigpu_cli.checkpoint.run_folder import write_summary
from multigpu_cli.checkpoint.weights import fingerprint, read_weights, save_weights
from multigpu_cli.config.pinned import settings
from multigpu_cli.config.sources import dump
from multigpu_cli.data.loader import Loader
from multigpu_cli.monitor.journal import valid_json
from multigpu_cli.run.parts import Run
from multigpu_cli.runtime.collectives import decided, gathered
from multigpu_cli.tasks.base import Evaluation


def open_run(run: Run) -> None:
    """Write the settings, and the first lines of this attempt."""
    if run.world.main:
        publish(run.folder / "config.yaml", dump(run.settled.words).encode())
        if run.tensorboard:
            run.tensorboard.plan(run.plan.rows())
    start = run.settled.start
    run.journal.write(
        "start",
        plan=run.plan.as_dict(),
        world_size=run.world.size,
        devices=[str(device) for device in run.choice.devices],
        data=run.train.where,
        versions={"torch": torch.__version__, "python": platform.python_version()},
        resumed_from=start.checkpoint,
    )
    for note in start.notes:
        run.journal.write("fault", kind="damaged checkpoint", action=note)
        run.console.warn(note)
    if start.manifest:
        before = start.manifest["world_size"]
        run.journal.write("resume", step=run.progress.step, from_world_size=before, world_size=run.world.size)
        if not run.settled.same_length:
            run.console.note(f"the run now has {run.plan.schedule.total_steps} steps: the schedule was recomputed")


def log_step(run: Run, losses: Tensor, outcome: Tensor) -> None:
    """One `train` line; the only place where the host waits for the numbers of a step.

    Args:
        losses: (micro-batches,) float64, this worker's loss sums; the others' slots are zero. Added without rounding,
            so that the figure does not depend on the number of workers.
        outcome: (2,) the gradient norm, and 1 where the step was skipped.
    """
    everyone = torch.stack(gathered(run.world, torch.cat([losses, peak_memory_here(run).double()]))).tolist()
    rates = run.meters.read()
    progress, batches = run.progress, run.plan.batches
    fields: dict[str, Any] = {
        "step": progress.step,
        "epoch": -(-progress.step // batches.steps_per_epoch),
        "samples": batches.samples_after(progress.step),
        "loss": fsum(value for row in everyone for value in row[:-1]) / _samples_in(run),
        "lr": run.plan.schedule.at(progress.step - 1),
        "grad_norm": float(outcome[0]),
        "samples_per_second": rates["samples_per_second"],
        "step_ms": rates["step_ms"],
        "data_wait_share": rates.get("data_wait_share", 0.0),
        "comm_share": rates.get("comm_share"),
        "memory": [int(row[-1]) for row in everyone],
    }
    run.progress.last["train_loss"] = fields["loss"]
    run.console.train(run.journal.write("train", **fields))
    if skipped := run.nonfinite.read(progress.step):
        note_fault(run, "nonfinite", f"{skipped} step(s) skipped: the gradient was NaN or infinite")


def _samples_in(run: Run) -> int:
    """Samples of the step that has just ended."""
    return run.plan.batches.samples_in((run.progress.step - 1) % run.plan.batches.steps_per_epoch)


def note_fault(run: Run, kind: str, action: str) -> None:
    """Journal something that went wrong, and tell the user."""
    run.journal.write("fault", kind=kind, action=action, step=run.progress.step)
    run.progress.faults.append({"kind": kind, "action": action, "step": run.progress.step})
    run.console.warn(f"step {run.progress.step}: {action}")


def evaluate(run: Run, split: str, loader: Loader) -> Evaluation:
    """One exact pass over a split with the weights for use, journalled."""
    with run.meters.paused():
        found = run.task.evaluate(run.kept.for_use(), loader, run.world, run.precision, run.eval_batch)
        progress = run.progress
        epoch = -(-progress.step // run.plan.batches.steps_per_epoch)
        entry = run.journal.write(
            "eval", epoch=epoch, step=progress.step, split=split, samples=found.samples, **found.metrics
        )
        run.console.eval(entry)
    run.progress.last |= {f"{split}_{name}": value for name, value in found.metrics.items()}
    return found


def judge(run: Run) -> None:
    """At the end of an epoch: evaluate, keep the best weights, and stop early where nothing improves any more."""
    progress = run.progress
    if run.val is None:
        return
    found = evaluate(run, "val", run.val)
    score = list(run.task.score(found.metrics))
    if not progress.score or score > progress.score:
        epoch = -(-progress.step // run.plan.batches.steps_per_epoch)
        progress.score, progress.stale_epochs = score, 0
        progress.best = {"epoch": epoch, "step": progress.step, **found.metrics}
        publish_weights(run, "best.pt", progress.best)
    else:
        progress.stale_epochs += 1
        if run.config.length.patience and progress.stale_epochs >= run.config.length.patience:
            progress.stopped_early = True
            run.console.note(f"stopping early: no improvement in {progress.stale_epochs} epochs")


def publish_weights(run: Run, name: str, metrics: dict[str, Any]) -> None:
    if run.world.main:
        with run.meters.paused():
            save_weights(run.folder / name, run.kept.for_use().state_dict(), settings(run.settled.words), metrics)


def save(run: Run) -> None:
    """Write a checkpoint; rank 0 does, the others have nothing that it lacks."""
    if not run.world.main:
        return
    with run.meters.paused():
        began = time.perf_counter()
        live = run.progress
        before, live.train_seconds = live.train_seconds, live.train_seconds + run.meters.seconds
        state = run.kept.capture()
        live.train_seconds = before
        facts = run.settled.facts() | {"world_size": run.world.size, "versions": {"torch": torch.__version__}}
        size = run.store.save(live.step, state, facts)
        seconds = time.perf_counter() - began
        run.journal.write("checkpoint", step=live.step, seconds=seconds, stall_seconds=seconds, bytes=size)


def conclude(run: Run) -> dict[str, Any]:
    """The end of a run that was not cut short: publish the weights, and touch the test set once, with the best ones."""
    progress, state = run.progress, run.kept.for_use().state_dict()
    mark = fingerprint(state)
    publish_weights(run, "last.pt", dict(progress.last))
    if run.val is None:
        publish_weights(run, "best.pt", dict(progress.last))
    else:
        run.kept.for_use().load_state_dict(decided(run.world, lambda: read_weights(run.folder / "best.pt")))
    details: dict[str, Any] = {}
    if run.test is not None:
        details = evaluate(run, "test", run.test).details
    return {"fingerprint": mark, **details}


def summary(run: Run, status: str, ending: dict[str, Any], startup: float) -> dict[str, Any]:
    """What summary.json holds; every rank computes it, rank 0 writes it.

    Args:
        ending: fingerprint and details of a completed run; the error of a failed one.
        startup: seconds from the start of this attempt to its first step.
    """
    progress, batches = run.progress, run.plan.batches
    names = ("train_loss", "val_loss", "val_accuracy", "test_loss", "test_accuracy")
    seconds = progress.train_seconds + run.meters.seconds
    return {
        "status": status,
        "strategy": run.plan.strategy,
        "world_size": run.world.size,
        "devices": batches.workers,
        "device": run.plan.device,
        "precision": run.plan.precision,
        "epochs": progress.step // batches.steps_per_epoch,
        "steps": progress.step,
        "samples": batches.samples_after(progress.step),
        "global_batch_size": batches.global_batch,
        "train_seconds": seconds,
        "startup_seconds": progress.startup_seconds + startup,
        "samples_per_second": run.meters.samples_per_second if run.meters.steps else None,
        "step_ms": run.meters.step_ms() if run.meters.steps else {"p50": None, "p95": None},
        "final": {name: progress.last.get(name) for name in names} | progress.last,
        "best": progress.best,
        "peak_memory_bytes": ending.pop("peak_memory_bytes", [peak_memory(run.world.device)]),
        "fingerprint": None,
        "save_dir": str(run.folder),
        "resumed_from": run.settled.start.checkpoint,
        "faults": progress.faults,
    } | ending


def close_run(run: Run, found: dict[str, Any]) -> None:
    """Write summary.json, whichever way the run ended, and the journal's last line."""
    if run.world.main:
        write_summary(run.folder, valid_json(found, indent=1))
        if run.tensorboard and found["status"] == "completed":
            run.tensorboard.hyperparameters(settings(run.settled.words), found["final"])
    run.journal.write("end", status=found["status"], step=run.progress.step, fingerprint=found["fingerprint"])


def peak_memory_here(run: Run) -> Tensor:
    """(1,) int64, to be gathered."""
    return torch.tensor([peak_memory(run.world.device)], device=run.world.device)


def peak_memory(device: torch.device) -> int:
    """Bytes: of the GPU's allocator, or of this process where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024
