"""Tracks the best weights over a run's evaluations, and stops early when nothing improves any more."""

from math import isnan

from multigpu_cli.checkpoint.weights import copy_to_host
from multigpu_cli.run.check_metrics import check_best_name
from multigpu_cli.run.run import Run
from multigpu_cli.tasks.base import Evaluation


def track_best(run: Run, result: Evaluation) -> None:
    """Record an evaluation of the validation split: the best so far, or one epoch without improvement."""
    progress, patience = run.progress, run.config.length.early_stopping_patience
    score = _compute_score(run, result.metrics)
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


def _compute_score(run: Run, metrics: dict[str, float]) -> list[float]:
    """What orders results: the number that --best names, or the task's own score."""
    if (best := run.config.metric.best) is None:
        return list(run.task.score(metrics))
    check_best_name(best, list(metrics))  # a task that evaluates in its own way did not say them before
    name, _, which = best.removeprefix("val_").partition(":")
    return [metrics[name] if which == "max" else -metrics[name]]


def _is_better(score: list[float], best: list[float]) -> bool:
    """Whether a score is the greatest so far; one with NaN never is, and any other is better than it."""
    return not any(map(isnan, score)) and (not best or any(map(isnan, best)) or score > best)
