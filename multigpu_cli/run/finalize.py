"""Ends a run: final weights, the evaluation of the test split, and the summary."""

from typing import Any

from torch import Tensor

from multigpu_cli.checkpoint.best import restore_file
from multigpu_cli.checkpoint.lock import check_owner, fail_on_write_error
from multigpu_cli.checkpoint.manifest import BEST
from multigpu_cli.checkpoint.weights import fingerprint, read_weights, save_weights
from multigpu_cli.faults.interpret_error import find_unused_parameters
from multigpu_cli.run.checkpointing import save_checkpoint, wait_for_last_checkpoint
from multigpu_cli.run.evaluation import evaluate
from multigpu_cli.run.run import Run
from multigpu_cli.run.summary import build_summary, write_run_end
from multigpu_cli.run.train_log import peak_memory
from multigpu_cli.runtime.collectives import all_gather_object
from multigpu_cli.runtime.raise_on_all_ranks import run_on_all_ranks, run_on_main_rank
from multigpu_cli.runtime.schedule_free import use_eval_weights


def finish_run(run: Run, status: str) -> dict[str, Any]:
    """End a run that completed or stopped; returns its summary.

    Raises:
        TrainingError: weights, checkpoint or summary could not be written.
    """
    end = finish_completed(run) if status == "completed" else finish_stopped(run)
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
    use_eval_weights(run.state.optimizer)  # for good: a checkpoint has those that take steps
    model = run.state.eval_model()
    state = run.strategy.gather_state({"model": model.state_dict()}).get("model", {})
    mark = run_on_main_rank(run.world, lambda: fingerprint(state))
    best = run_on_all_ranks(run.world, lambda: _publish_weights(run, state) if run.world.is_main else {})
    if own := run.strategy.scatter_state({"model": best})["model"]:
        model.load_state_dict(own)
    if run.spec.user_objects and run.state.average:
        run.state.model.load_state_dict(run.state.eval_model().state_dict())
    details = evaluate(run, "test", run.loaders.test).details if run.loaders.test is not None else {}
    return {"fingerprint": mark, **details}


def _publish_weights(run: Run, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Write last.pt; returns the best weights, or {} if the last ones are the best."""
    best, words, metrics = run.folder / "best.pt", run.spec.weights_metadata(), dict(run.progress.last)
    with fail_on_write_error(run.folder):
        check_owner(run.folder)
        save_weights(run.folder / "last.pt", state, words, metrics, run.observer.watchdog.mark_progress)
        if run.progress.best:
            if restore_file([best, *run.folder.glob(f"checkpoints/*/{BEST}")], run.checkpointer.best_sha256):
                return read_weights(best)
            run.log_fault("checkpoint", "best.pt is lost: the last weights replace it")
        save_weights(best, state, words, metrics, run.observer.watchdog.mark_progress)
    return {}


def finish_stopped(run: Run) -> dict[str, Any]:
    """End a run that was asked to stop: wait for its checkpoint."""
    wait_for_last_checkpoint(run)
    run.observer.watchdog.record_stop()
    return {}


def name_unused_parameters(run: Run, error: BaseException) -> None:
    """Add the names of the parameters that DDP lists by index, because they took no part in the loss."""
    trained = [name for name, parameter in run.state.model.named_parameters() if parameter.requires_grad]
    if names := find_unused_parameters(error, trained):
        error.add_note(f"no gradient for: {', '.join(names[:8])}")


def finish_failed(run: Run, error: BaseException) -> dict[str, Any]:
    """End a failed run: write and return a summary with the reason."""
    summary = build_summary(run, "failed", {"error": f"{type(error).__name__}: {error}"})
    write_run_end(run, summary)
    return summary
