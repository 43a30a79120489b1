"""The summary of a run: what summary.json holds, and how a run's folder is completed."""

from typing import Any

from multigpu_cli.checkpoint.files import publish
from multigpu_cli.checkpoint.lock import check_owner, fail_on_write_error
from multigpu_cli.checkpoint.run_folder import write_summary
from multigpu_cli.config.resume_rules import flatten_settings
from multigpu_cli.errors import TrainingError
from multigpu_cli.monitor.journal import dump_json
from multigpu_cli.run.run import Run
from multigpu_cli.run.train_log import peak_memory
from multigpu_cli.runtime.rank_output import find_ranks_with_output, log_path


def build_summary(run: Run, status: str, ending: dict[str, Any]) -> dict[str, Any]:
    """The content of summary.json: every rank computes it, rank 0 writes it.

    Args:
        ending: more entries: fingerprint and details of a completed run, or the error of a failed one.
    """
    progress, batches, train, timer = run.progress, run.plan.batches, run.loaders.train, run.observer.timer
    names = ("train_loss", "val_loss", "val_accuracy", "test_loss", "test_accuracy")
    return {
        "status": status,
        "strategy": run.plan.strategy,
        "world_size": run.world.size,
        "devices": batches.workers,
        "device": run.plan.device,
        "precision": run.plan.precision,
        "epochs": progress.step // batches.steps_per_epoch,
        "steps": train.optimizer_steps_done_at(progress.step, batches),
        "samples": train.samples_seen_at(progress.step, batches),
        "global_batch_size": batches.global_batch,
        "train_seconds": progress.train_seconds + timer.seconds,
        "startup_seconds": progress.startup_seconds,
        "samples_per_second": timer.samples_per_second if timer.steps else None,
        "step_ms": timer.step_ms() if timer.steps else {"p50": None, "p95": None},
        "final": {name: progress.last.get(name) for name in names} | progress.last,
        "best": progress.best,
        "peak_memory_bytes": [peak_memory(run.world.device)],
        "fingerprint": None,
        "save_dir": str(run.folder),
        "resumed_from": run.spec.resume_point.checkpoint,
        "faults": progress.faults,
    } | ending


def write_run_end(run: Run, summary: dict[str, Any]) -> None:
    """Write summary.json and the journal's last line, however the run ended."""
    if run.world.is_main:
        logs = run.folder / "logs"
        if ranks := find_ranks_with_output(logs, run.world.size):
            run.log.console.note(f"output of rank {', '.join(map(str, ranks))}: {log_path(logs, ranks[0])}")
        _write_summary(run, summary)
        if summary["status"] == "completed":
            with fail_on_write_error(run.folder):
                for name, content in run.task.plots(summary).items():
                    publish(run.folder / name, content)
            if run.log.tensorboard:
                run.log.tensorboard.hyperparameters(flatten_settings(run.spec.user_config), summary["final"])
    run.log.journal.write("end", status=summary["status"], step=run.progress.step, fingerprint=summary["fingerprint"])
    run.control.summary_written = True
    for tell in run.moments.end:
        tell(run, summary)


def _write_summary(run: Run, summary: dict[str, Any]) -> None:
    try:
        with fail_on_write_error(run.folder):
            check_owner(run.folder)
            write_summary(run.folder, dump_json(summary, indent=1))
    except TrainingError as error:
        if summary["status"] != "failed":
            raise
        run.log.console.warn(error.problem)  # the reason of the failure is reported, not this one
