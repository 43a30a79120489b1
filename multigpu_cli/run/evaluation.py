"""Evaluations: exact passes over a split, at the end of an epoch and of the run."""

from torch import nn

from multigpu_cli.data.loader import Loader
from multigpu_cli.errors import OutOfMemory
from multigpu_cli.run.oom_recovery import halve_eval_batch
from multigpu_cli.run.report_skipped_steps import report_skipped_steps
from multigpu_cli.run.run import Run
from multigpu_cli.run.track_best import track_best
from multigpu_cli.runtime.out_of_memory import free_memory
from multigpu_cli.tasks.base import Evaluation


def evaluate(run: Run, split: str, loader: Loader) -> Evaluation:
    """One exact pass over a split with the weights that are published (the average, with --ema); journalled."""
    model, progress = run.state.eval_model(), run.progress
    moving = model.register_forward_pre_hook(lambda *_: run.observer.watchdog.set_position(progress.step, "evaluating"))
    with run.observer.timer.pause():
        result = _evaluate_in_batches(run, model, loader)
        moving.remove()
        entry = run.log.journal.write(
            "eval", epoch=run.epoch, step=progress.step, split=split, samples=result.samples, **result.metrics
        )
        run.log.console.eval(entry)
    run.progress.last |= {f"{split}_{name}": value for name, value in result.metrics.items()}
    return result


def _evaluate_in_batches(run: Run, model: nn.Module, loader: Loader) -> Evaluation:
    """Evaluate, with smaller batches after each out-of-memory error."""
    while True:
        try:
            return run.task.evaluate(model, loader, run.world, run.state.precision, run.eval_batch_size)
        except OutOfMemory:
            text = halve_eval_batch(run)
        free_memory(run.world.device)
        run.log_fault("out of memory", text)


def evaluate_epoch(run: Run) -> None:
    """At the end of an epoch: evaluate, record the best weights, and stop early if nothing improves any more."""
    progress = run.progress
    report_skipped_steps(run)
    run.observer.loss.all_reduce_pending()
    if reached := run.task.stop_reason():
        progress.stopped_early = True
        run.log.console.note(f"ending early: {reached}")
    last = progress.stopped_early or progress.step == run.plan.schedule.total_steps
    if run.loaders.val is None or not (last or run.task.should_evaluate(run.epoch)):
        return
    track_best(run, evaluate(run, "val", run.loaders.val))
