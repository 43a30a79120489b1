"""Tracks the best weights over a run's evaluations, and stops early when nothing improves any more."""

from math import isnan

from multigpu_cli.checkpoint.weights import copy_to_host
from multigpu_cli.run.run import Run
from multigpu_cli.tasks.base import Evaluation


def track_best(run: Run, result: Evaluation) -> None:
    """Record an evaluation of the validation split: the best so far, or one epoch without improvement."""
    progress, patience = run.progress, run.config.length.early_stopping_patience
    score = list((run.score or run.task.score)(result.metrics))
    if _is_better(score, progress.score):
        progress.score, progress.stale_epochs = score, 0
        named = {f"val_{name}": value for name, value in result.metrics.items()}
        progress.best = {"epoch": run.epoch, "step": progress.step, **result.metrics, **named}
        with run.observer.timer.pause():
            weights = run.strategy.gather_state({"model": run.state.eval_model().state_dict()})
            if run.world.is_main:
                run.checkpointer.best = weights["model"] if run.strategy.sharded else copy_to_host(weights["model"])
    elif progress.best:
        progress.stale_epochs += 1
        if patience and progress.stale_epochs >= patience:
            progress.stopped_early = True
            run.log.console.note(f"stopping early: no improvement in {progress.stale_epochs} epochs")


def _is_better(score: list[float], best: list[float]) -> bool:
    """Whether a score is the greatest so far; one with NaN never is, and any other is better than it."""
    return not any(map(isnan, score)) and (not best or any(map(isnan, best)) or score > best)
