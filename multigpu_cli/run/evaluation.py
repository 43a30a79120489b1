"""Evaluations: exact passes over a split, at the end of an epoch and of the run; and which was the best."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import isnan

from torch import nn

from multigpu_cli.data.loader import Loader
from multigpu_cli.distributed.world import free_memory, is_out_of_memory
from multigpu_cli.errors import EvaluationStopped, OutOfMemory
from multigpu_cli.faults.stop import StopConsensus
from multigpu_cli.monitor.format import format_epoch
from multigpu_cli.monitor.meters import divide
from multigpu_cli.run.batch_size import end_evaluation_without_memory, halve_eval_batch
from multigpu_cli.run.checkpointing import save_evaluation
from multigpu_cli.run.run import Run, use_published_weights
from multigpu_cli.run.train_log import report_skipped_steps
from multigpu_cli.tasks.base import Evaluation


def evaluate(run: Run, split: str, loader: Loader, *, show: bool = True) -> Evaluation:
    """One exact pass over a split with the weights that are published (the average, with --ema); journalled.

    EvaluationStopped: a signal asked some rank to stop the run; nothing was recorded.

    The caller puts those of a schedule-free optimizer into the model, see `use_published_weights`.
    """
    model, progress = run.state.eval_model(), run.progress
    watchdog = run.observer.watchdog
    with run.observer.timer.pause():
        with model.register_forward_pre_hook(lambda *_: watchdog.set_position(progress.step, "evaluating")):
            result = _evaluate_in_batches(run, model, split, loader)
        watchdog.count_arrival()
        entry = run.log.journal.write(
            "eval", epoch=run.epoch, step=progress.step, split=split, samples=result.samples, **result.metrics
        )
        if show:
            run.log.console.eval(entry)
        run.progress.last |= {f"{split}_{name}": value for name, value in result.metrics.items()}
        for tell in run.moments.evaluated:
            tell(run, split, result.metrics)
    return result


def _evaluate_in_batches(run: Run, model: nn.Module, split: str, loader: Loader) -> Evaluation:
    """Evaluate, with smaller batches after each out-of-memory error, unless others wait for this rank."""
    run.task.group_size = run.plan.batches.global_batch
    while True:
        try:
            with _show_progress(run, split, loader), _leave_on_signal(run):
                return run.task.evaluate(model, loader, run.world, run.state.precision, run.eval_batch_size)
        except OutOfMemory:
            text = halve_eval_batch(run)
        except RuntimeError as error:
            if not run.strategy.sharded or not is_out_of_memory(error):
                raise
            end_evaluation_without_memory(run)
        free_memory(run.world.device)
        run.log_fault("out of memory", text)


@contextmanager
def _show_progress(run: Run, split: str, loader: Loader) -> Iterator[None]:
    """Show how many of the main rank's batches are done."""
    before = run.task.batch_evaluated
    size = getattr(loader, "size", 0)  # a task's own loader may have none
    batches = -(-size // run.eval_batch_size) // run.world.size
    with run.log.console.evaluation_progress(split, batches) as bar:
        run.task.batch_evaluated = bar.update
        try:
            yield
        finally:
            run.task.batch_evaluated = before


@contextmanager
def _leave_on_signal(run: Run) -> Iterator[None]:
    """Have all ranks leave the evaluation at the same batch, with an EvaluationStopped, after a signal to one of them.

    They vote about every half second, as they do between steps.
    """
    consensus = StopConsensus(run.world)

    def meet(done: int, more: bool) -> int:
        run.observer.watchdog.count_arrival()
        stopping, more = consensus.vote(done, (run.control.stop.signal is not None, more))
        if stopping and more:
            raise EvaluationStopped
        return consensus.steps_until_vote(done) if more else 0

    run.task.meet = meet
    try:
        yield
    finally:
        run.task.meet = None


def plan_evaluation(run: Run) -> None:
    """At the end of an epoch, before its checkpoint: end the run if its goal is reached; say whether to evaluate."""
    progress = run.progress
    report_skipped_steps(run)
    run.observer.loss.all_reduce_pending()
    if reached := run.task.stop_reason():
        progress.stopped_early = True
        run.log.console.note(f"ending early: {reached}")
    evaluates = run.loaders.val is not None and (run.finished or run.task.should_evaluate(run.epoch))
    progress.evaluation_pending = evaluates or bool(run.moments.epoch_end)


def evaluate_epoch(run: Run) -> bool:
    """At the end of an epoch: evaluate, record the best weights, and stop early if nothing improves any more.

    Return whether this was done: after a signal it is left, stays pending, and is made when the run resumes.
    """
    progress, timer = run.progress, run.observer.timer
    if run.finished or run.task.should_evaluate(run.epoch):
        metrics: dict[str, float] = {}
        if run.loaders.val is not None:
            try:
                with use_published_weights(run):
                    result = evaluate(run, "val", run.loaders.val, show=False)  # in the epoch's line
                    track_best(run, result)
            except EvaluationStopped:
                return False
            metrics = {f"val_{name}": value for name, value in result.metrics.items()}
        with timer.pause():
            samples, seconds = timer.samples - run.log.at_last_epoch[0], timer.seconds - run.log.at_last_epoch[1]
            run.log.at_last_epoch = timer.samples, timer.seconds
            numbers = {"train_loss": progress.last.get("train_loss"), **metrics}
            cells = format_epoch(run.epoch, run.epochs, numbers, divide(samples, seconds), seconds)
            run.log.console.epoch(cells, best=bool(metrics) and progress.best.get("step") == progress.step)
    was_pending, progress.evaluation_pending = progress.evaluation_pending, False
    for tell in run.moments.epoch_end:
        tell(run)
    if was_pending:
        save_evaluation(run)
    return True


def track_best(run: Run, result: Evaluation) -> None:
    """Record an evaluation of the validation split: the best so far, or one epoch without improvement."""
    progress, patience = run.progress, run.config.length.early_stopping_patience
    score, best = list((run.score or run.task.score)(result.metrics)), progress.score
    # one with NaN is never the greatest so far, and any other is better than it: nothing is >= NaN, nor is []
    if not any(map(isnan, score)) and not best >= score:
        progress.score, progress.stale_epochs = score, 0
        named = {f"val_{name}": value for name, value in result.metrics.items()}
        progress.best = {"epoch": run.epoch, "step": progress.step, **result.metrics, **named}
        with run.observer.timer.pause():
            run.checkpointer.best = {}  # earlier ones, if they were not written, give their memory
            run.checkpointer.best = run.checkpointer.saver.capture_best(run.state.eval_model().state_dict())
    elif progress.best:
        progress.stale_epochs += 1
        if patience and progress.stale_epochs >= patience:
            progress.stopped_early = True
            run.log.console.note(f"stopping early: no improvement in {progress.stale_epochs} epochs")
