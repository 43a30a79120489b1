"""Ends a run: final weights, the evaluation of the test split with the best ones, and the summary."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multigpu_cli.checkpoint.files import check_owner, fail_on_write_error, publish
from multigpu_cli.checkpoint.manifest import BEST
from multigpu_cli.checkpoint.run_folder import write_summary
from multigpu_cli.checkpoint.store import find_file, read_best, restore_file
from multigpu_cli.checkpoint.weights import copy_to_host, fingerprint, read_weights, save_weights
from multigpu_cli.config.resume_rules import flatten_settings
from multigpu_cli.distributed.processes import find_ranks_with_output, log_path
from multigpu_cli.distributed.world import all_gather_object, run_on_all_ranks, run_on_main_rank
from multigpu_cli.errors import EvaluationStopped, TrainingError
from multigpu_cli.monitor.journal import dump_json
from multigpu_cli.optimizers.eval_weights import is_schedule_free
from multigpu_cli.run.checkpointing import save_checkpoint, wait_for_last_checkpoint
from multigpu_cli.run.evaluation import evaluate
from multigpu_cli.run.run import Run
from multigpu_cli.run.train_log import peak_memory


def finish_run(run: Run, status: str) -> dict[str, Any]:
    """End a run that completed or stopped; returns its summary, or raises a TrainingError if a write fails.

    A run that a signal stops in the evaluation of the test split counts as stopped.
    """
    end: dict[str, Any] = {}
    run.log.state.ending = True
    if status == "completed":
        try:
            end = finish_completed(run)
        except EvaluationStopped:  # all that came before it is saved
            status = "stopped"
            run.log.console.note("stopped in the evaluation of the test split; the same command repeats it")
    else:
        wait_for_last_checkpoint(run)
    if status == "stopped":
        run.observer.watchdog.record_stop()
    run.log.progress_bar.close()
    end["peak_memory_bytes"] = all_gather_object(run.world, peak_memory(run.world.device))
    summary = build_summary(run, status, end)
    write_run_end(run, summary)
    return summary


def finish_completed(run: Run) -> dict[str, Any]:
    """End a completed run: publish the weights, and evaluate the test split once, with the best ones."""
    if run.checkpointer.saved_step != run.progress.step:  # a user's own loop may end at any step
        save_checkpoint(run)
    wait_for_last_checkpoint(run)
    if is_schedule_free(run.state.optimizer):
        run.state.optimizer.eval()  # type: ignore[attr-defined]  # for good: a checkpoint has those that take steps
    model = run.state.eval_model()
    state = run.strategy.gather_state({"model": model.state_dict()}).get("model", {})
    mark = run_on_main_rank(run.world, lambda: fingerprint(state))
    best = run_on_all_ranks(run.world, lambda: _publish_weights(run, state) if run.world.is_main else {})
    if own := run.strategy.scatter_state({"model": best}, into={"model": model.state_dict()})["model"]:
        model.load_state_dict(own)
    if run.state.average:  # a model of the caller's own is to have them too
        run.state.model.load_state_dict(model.state_dict())
    details = evaluate(run, "test", run.loaders.test).details if run.loaders.test is not None else {}
    return {"fingerprint": mark, **details}


def _publish_weights(run: Run, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Write last.pt; returns the best weights, or {} if the last ones are the best."""
    best, words, metrics = run.folder / "best.pt", run.spec.weights_metadata(), dict(run.progress.last)
    with fail_on_write_error(run.folder):
        check_owner(run.folder)
        last = state if run.strategy.sharded else copy_to_host(state)  # gathered ones are copies already
        save_weights(run.folder / "last.pt", last, words, metrics, run.observer.watchdog.mark_progress)
        if run.progress.best:
            if restore_file([best, *run.folder.glob(f"checkpoints/*/{BEST}")], run.checkpointer.best_sha256):
                return read_weights(best)
            run.log_fault("checkpoint", "best.pt is lost: the last weights replace it")
        save_weights(best, last, words, metrics, run.observer.watchdog.mark_progress)
    return {}


def build_summary(run: Run, status: str, ending: dict[str, Any]) -> dict[str, Any]:
    """The content of summary.json, which every rank computes; `ending` has more entries: of its end, or its error."""
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
        "best_by": _name_score(progress.best, progress.score),
        "peak_memory_bytes": [peak_memory(run.world.device)],
        "fingerprint": None,
        "save_dir": str(run.folder),
        "resumed_from": run.spec.resume_point.checkpoint,
        "faults": progress.faults,
    } | ending


def _name_score(best: dict[str, float], score: list[float]) -> str | None:
    """The number by which the best evaluation was chosen; None where no number, or more than one, is its score."""
    named = [name for name, value in best.items() if name.startswith("val_") and abs(value) == abs(score[0])]
    return named[0] if len(named) == 1 else None


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
    end = {name: summary[name] for name in ("status", "fingerprint", "cause", "rank") if name in summary}
    run.log.journal.write("end", step=run.progress.step, **end)
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


def restore_best_file(run: Run) -> str:
    """Restore the best.pt of the checkpoint: the folder's may be of a later step; a warning if it is lost, else ""."""
    point, best, file = run.spec.resume_point, run.progress.best, run.folder / "best.pt"
    if not point.checkpoint:
        return ""
    sent = None
    if point.checkpoint_rank:
        sent = run_on_main_rank(run.world, lambda: _to_tensor(_read_best(run)), by=point.checkpoint_rank)
    is_best = bool(best) and best["step"] == run.progress.step
    own: dict[str, Any] = {}
    if is_best:
        with run.state.eval_weights() as model:
            whole = run.strategy.gather_state({"model": model.state_dict()})
            own = copy_to_host(whole) if run.world.is_main else {}

    def restore() -> bool:
        content = _read_best(run) if not point.checkpoint_rank else None if sent is None else sent.numpy().tobytes()
        checkpointer = run.checkpointer
        with fail_on_write_error(run.folder):
            if content is not None:
                checkpointer.best_sha256 = sha256(content).hexdigest()
                if find_file([file], checkpointer.best_sha256) is None:
                    publish(file, content)
            elif is_best:  # an old checkpoint, whose own state is the best
                checkpointer.best_sha256 = save_weights(file, own["model"], run.spec.weights_metadata(), best)
            elif file.is_file():
                file.replace(run.folder / "replaced_best.pt")
            return file.is_file()

    if run_on_main_rank(run.world, restore) or not best:
        return ""
    run.progress.best, run.progress.score = {}, []
    return f"the best weights so far, of step {best['step']}, are lost: those of the next evaluation replace them"


def _read_best(run: Run) -> bytes | None:
    """The best weights that belong to the checkpoint, read on the node that has it."""
    point, best = run.spec.resume_point, run.progress.best
    if not best or not point.checkpoint or not point.manifest:
        return None
    checkpoint = Path(point.checkpoint)
    with fail_on_write_error(checkpoint):
        return read_best(checkpoint, point.manifest, int(best["step"]))


def _to_tensor(content: bytes | None) -> Tensor | None:
    return None if content is None else torch.frombuffer(bytearray(content), dtype=torch.uint8)
