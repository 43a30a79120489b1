"""How a run ends: its weights, the one look at the test set, and the summary."""

from typing import Any

import torch
from torch import Tensor

from multigpu_cli.checkpoint.best import BEST, bring_back
from multigpu_cli.checkpoint.files import publish
from multigpu_cli.checkpoint.lock import check_ours, needed
from multigpu_cli.checkpoint.run_folder import write_summary
from multigpu_cli.checkpoint.weights import fingerprint, read_weights, save_weights
from multigpu_cli.config.pinned import settings
from multigpu_cli.errors import TrainingError
from multigpu_cli.faults.causes import unused_names
from multigpu_cli.monitor.journal import valid_json
from multigpu_cli.run.checkpointing import save, settle_writes
from multigpu_cli.run.evaluation import evaluate
from multigpu_cli.run.run import Run
from multigpu_cli.run.train_log import peak_memory
from multigpu_cli.runtime.aside import log_of, who_spoke
from multigpu_cli.runtime.collectives import decided, gathered, together


def finish_run(run: Run, status: str) -> dict[str, Any]:
    """The end of a run that did not fail, completed or stopped; returns its summary.

    Raises:
        TrainingError: what it should leave behind could not be written.
    """
    end = conclude(run) if status == "completed" else leave(run)
    run.log.bar.close()
    peak = torch.tensor([peak_memory(run.world.device)], device=run.world.device)
    end["peak_memory_bytes"] = [int(each) for each in gathered(run.world, peak)]
    found = summary(run, status, end)
    close_run(run, found)
    return found


def conclude(run: Run) -> dict[str, Any]:
    """The end of a run that was not cut short: publish the weights, and touch the test set once, with the best ones."""
    if run.checkpointer.saved_step != run.progress.step:  # a loop of somebody's own ends where it likes
        save(run)
    together(run.world, lambda: settle_writes(run))
    state = run.kept.for_use().state_dict()
    mark = fingerprint(state)
    best = decided(run.world, lambda: _publish(run, state))
    if best:
        run.kept.for_use().load_state_dict(best)
    if run.settled.brought and run.kept.average:
        run.kept.model.load_state_dict(run.kept.for_use().state_dict())
    details = evaluate(run, "test", run.loaders.test).details if run.loaders.test is not None else {}
    return {"fingerprint": mark, **details}


def _publish(run: Run, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Write last.pt; returns the best weights, nothing where the last ones are the best."""
    best, words, metrics = run.folder / "best.pt", run.settled.label(), dict(run.progress.last)
    with needed(run.folder):
        check_ours(run.folder)
        save_weights(run.folder / "last.pt", state, words, metrics, run.observer.watch.moved)
        if run.progress.best:
            if bring_back([best, *run.folder.glob(f"checkpoints/*/{BEST}")], run.checkpointer.best_sum):
                return read_weights(best)
            run.note_fault("checkpoint", "best.pt has gone: the last weights take its place")
        save_weights(best, state, words, metrics, run.observer.watch.moved)
    return {}


def leave(run: Run) -> dict[str, Any]:
    """The end of a run that was asked to stop: nothing but the checkpoint."""
    together(run.world, lambda: settle_writes(run))
    run.observer.watch.stopped()
    return {}


def name_unused(run: Run, error: BaseException) -> None:
    """DDP lists the parameters that took no part in the loss by index; people know them by name."""
    trained = [name for name, parameter in run.kept.model.named_parameters() if parameter.requires_grad]
    if names := unused_names(error, trained):
        error.add_note(f"no gradient for: {', '.join(names[:8])}")


def fail(run: Run, error: BaseException) -> dict[str, Any]:
    """The end of a run that failed: a summary that says why, which is returned."""
    found = summary(run, "failed", {"error": f"{type(error).__name__}: {error}"})
    close_run(run, found)
    return found


def summary(run: Run, status: str, ending: dict[str, Any]) -> dict[str, Any]:
    """What summary.json holds; every rank computes it, rank 0 writes it.

    Args:
        ending: fingerprint and details of a completed run; the error of a failed one.
    """
    progress, batches = run.progress, run.plan.batches
    names = ("train_loss", "val_loss", "val_accuracy", "test_loss", "test_accuracy")
    seconds = progress.train_seconds + run.observer.meters.seconds
    return {
        "status": status,
        "strategy": run.plan.strategy,
        "world_size": run.world.size,
        "devices": batches.workers,
        "device": run.plan.device,
        "precision": run.plan.precision,
        "epochs": progress.step // batches.steps_per_epoch,
        "steps": run.loaders.train.steps_after(progress.step, batches),
        "samples": run.loaders.train.samples_after(progress.step, batches),
        "global_batch_size": batches.global_batch,
        "train_seconds": seconds,
        "startup_seconds": progress.startup_seconds,
        "samples_per_second": run.observer.meters.samples_per_second if run.observer.meters.steps else None,
        "step_ms": run.observer.meters.step_ms() if run.observer.meters.steps else {"p50": None, "p95": None},
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
        logs = run.folder / "logs"
        if spoke := who_spoke(logs, run.world.size):
            run.log.console.note(f"output of rank {', '.join(map(str, spoke))}: {log_of(logs, spoke[0])}")
        _leave_summary(run, found)
        if found["status"] == "completed":
            _leave_pictures(run, found)
        if run.log.tensorboard and found["status"] == "completed":
            run.log.tensorboard.hyperparameters(settings(run.settled.words), found["final"])
    run.log.journal.write("end", status=found["status"], step=run.progress.step, fingerprint=found["fingerprint"])
    run.control.ended = True


def _leave_pictures(run: Run, found: dict[str, Any]) -> None:
    for name, content in run.task.pictures(found).items():
        with needed(run.folder):
            publish(run.folder / name, content)


def _leave_summary(run: Run, found: dict[str, Any]) -> None:
    try:
        with needed(run.folder):
            check_ours(run.folder)
            write_summary(run.folder, valid_json(found, indent=1))
    except TrainingError as error:
        if found["status"] != "failed":
            raise
        run.log.console.warn(error.problem)  # what it failed of is the news
