"""How a run ends: its weights, the one look at the test set, and the summary."""

from typing import Any

import torch
from torch import Tensor

from multigpu_cli.checkpoint.best import BEST, restore_file
from multigpu_cli.checkpoint.files import publish
from multigpu_cli.checkpoint.lock import check_owner, fail_on_write_error
from multigpu_cli.checkpoint.run_folder import write_summary
from multigpu_cli.checkpoint.weights import fingerprint, read_weights, save_weights
from multigpu_cli.config.resume_rules import flatten_settings
from multigpu_cli.errors import TrainingError
from multigpu_cli.faults.diagnose import find_unused_parameters
from multigpu_cli.monitor.journal import dump_json
from multigpu_cli.run.checkpointing import save_checkpoint, wait_for_last_checkpoint
from multigpu_cli.run.evaluation import evaluate
from multigpu_cli.run.run_state import Run
from multigpu_cli.run.train_log import peak_memory
from multigpu_cli.runtime.collectives import all_gather
from multigpu_cli.runtime.rank_errors import run_on_all_ranks, run_on_main_rank
from multigpu_cli.runtime.rank_output import find_ranks_with_output, log_path


def finish_run(run: Run, status: str) -> dict[str, Any]:
    """The end of a run that did not fail, completed or stopped; returns its summary.

    Raises:
        TrainingError: what it should leave behind could not be written.
    """
    end = finish_completed(run) if status == "completed" else finish_stopped(run)
    run.log.progress_bar.close()
    peak = torch.tensor([peak_memory(run.world.device)], device=run.world.device)
    end["peak_memory_bytes"] = [int(each) for each in all_gather(run.world, peak)]
    summary = build_summary(run, status, end)
    close_run(run, summary)
    return summary


def finish_completed(run: Run) -> dict[str, Any]:
    """The end of a run that was not cut short: publish the weights, and touch the test set once, with the best ones."""
    if run.checkpointer.saved_step != run.progress.step:  # a loop of somebody's own ends where it likes
        save_checkpoint(run)
    run_on_all_ranks(run.world, lambda: wait_for_last_checkpoint(run))
    state = run.state.eval_model().state_dict()
    mark = fingerprint(state)
    best = run_on_main_rank(run.world, lambda: _publish_weights(run, state))
    if best:
        run.state.eval_model().load_state_dict(best)
    if run.spec.user_objects and run.state.average:
        run.state.model.load_state_dict(run.state.eval_model().state_dict())
    details = evaluate(run, "test", run.loaders.test).details if run.loaders.test is not None else {}
    return {"fingerprint": mark, **details}


def _publish_weights(run: Run, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Write last.pt; returns the best weights, nothing where the last ones are the best."""
    best, words, metrics = run.folder / "best.pt", run.spec.weights_metadata(), dict(run.progress.last)
    with fail_on_write_error(run.folder):
        check_owner(run.folder)
        save_weights(run.folder / "last.pt", state, words, metrics, run.observer.watchdog.mark_progress)
        if run.progress.best:
            if restore_file([best, *run.folder.glob(f"checkpoints/*/{BEST}")], run.checkpointer.best_sha256):
                return read_weights(best)
            run.log_fault("checkpoint", "best.pt has gone: the last weights take its place")
        save_weights(best, state, words, metrics, run.observer.watchdog.mark_progress)
    return {}


def finish_stopped(run: Run) -> dict[str, Any]:
    """The end of a run that was asked to stop: nothing but the checkpoint."""
    run_on_all_ranks(run.world, lambda: wait_for_last_checkpoint(run))
    run.observer.watchdog.record_stop()
    return {}


def name_unused_parameters(run: Run, error: BaseException) -> None:
    """DDP lists the parameters that took no part in the loss by index; people know them by name."""
    trained = [name for name, parameter in run.state.model.named_parameters() if parameter.requires_grad]
    if names := find_unused_parameters(error, trained):
        error.add_note(f"no gradient for: {', '.join(names[:8])}")


def finish_failed(run: Run, error: BaseException) -> dict[str, Any]:
    """The end of a run that failed: a summary that says why, which is returned."""
    summary = build_summary(run, "failed", {"error": f"{type(error).__name__}: {error}"})
    close_run(run, summary)
    return summary


def build_summary(run: Run, status: str, ending: dict[str, Any]) -> dict[str, Any]:
    """What summary.json holds; every rank computes it, rank 0 writes it.

    Args:
        ending: fingerprint and details of a completed run; the error of a failed one.
    """
    progress, batches = run.progress, run.plan.batches
    names = ("train_loss", "val_loss", "val_accuracy", "test_loss", "test_accuracy")
    seconds = progress.train_seconds + run.observer.timer.seconds
    return {
        "status": status,
        "strategy": run.plan.strategy,
        "world_size": run.world.size,
        "devices": batches.workers,
        "device": run.plan.device,
        "precision": run.plan.precision,
        "epochs": progress.step // batches.steps_per_epoch,
        "steps": run.loaders.train.optimizer_steps_done_at(progress.step, batches),
        "samples": run.loaders.train.samples_seen_at(progress.step, batches),
        "global_batch_size": batches.global_batch,
        "train_seconds": seconds,
        "startup_seconds": progress.startup_seconds,
        "samples_per_second": run.observer.timer.samples_per_second if run.observer.timer.steps else None,
        "step_ms": run.observer.timer.step_ms() if run.observer.timer.steps else {"p50": None, "p95": None},
        "final": {name: progress.last.get(name) for name in names} | progress.last,
        "best": progress.best,
        "peak_memory_bytes": ending.pop("peak_memory_bytes", [peak_memory(run.world.device)]),
        "fingerprint": None,
        "save_dir": str(run.folder),
        "resumed_from": run.spec.start.checkpoint,
        "faults": progress.faults,
    } | ending


def close_run(run: Run, summary: dict[str, Any]) -> None:
    """Write summary.json, whichever way the run ended, and the journal's last line."""
    if run.world.is_main:
        logs = run.folder / "logs"
        if spoke := find_ranks_with_output(logs, run.world.size):
            run.log.console.note(f"output of rank {', '.join(map(str, spoke))}: {log_path(logs, spoke[0])}")
        _write_summary(run, summary)
        if summary["status"] == "completed":
            _write_plots(run, summary)
        if run.log.tensorboard and summary["status"] == "completed":
            run.log.tensorboard.hyperparameters(flatten_settings(run.spec.user_config), summary["final"])
    run.log.journal.write("end", status=summary["status"], step=run.progress.step, fingerprint=summary["fingerprint"])
    run.control.summary_written = True


def _write_plots(run: Run, summary: dict[str, Any]) -> None:
    for name, content in run.task.plots(summary).items():
        with fail_on_write_error(run.folder):
            publish(run.folder / name, content)


def _write_summary(run: Run, summary: dict[str, Any]) -> None:
    try:
        with fail_on_write_error(run.folder):
            check_owner(run.folder)
            write_summary(run.folder, dump_json(summary, indent=1))
    except TrainingError as error:
        if summary["status"] != "failed":
            raise
        run.log.console.warn(error.problem)  # what it failed of is the news
