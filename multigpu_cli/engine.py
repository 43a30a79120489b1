"""Carries out a request and trains: every strategy, dataset and task runs through `train_step`."""

import gc
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from multigpu_cli.data.loader import Batch
from multigpu_cli.distributed.world import is_out_of_memory
from multigpu_cli.planning.batch import StepLayout
from multigpu_cli.run.assembly.components import StepResult
from multigpu_cli.run.batch_size import recover_from_out_of_memory
from multigpu_cli.run.checkpointing import save_checkpoint
from multigpu_cli.run.evaluation import evaluate_epoch, plan_evaluation
from multigpu_cli.run.finalize import finish_run
from multigpu_cli.run.global_batch import find_row_gradients
from multigpu_cli.run.open import ResolvedRequest, open_run
from multigpu_cli.run.part import add_requested_part
from multigpu_cli.run.run import Run
from multigpu_cli.run.step import forward_backward
from multigpu_cli.run.train_log import log_recovery, log_step
from multigpu_cli.runtime.precision import multiply_gradients
from multigpu_cli.runtime.seeding import seed_micro_batch, seed_optimizer_step


def run(request: ResolvedRequest) -> dict[str, Any]:
    """Carry out one request on this process's device; returns the summary.

    RequestError: the request is wrong; nothing was written. TrainingError: it failed; summary.json says so.
    """
    spec, console = request.spec, request.console
    if spec.is_complete:
        summary = spec.resume_point.summary or {}
        console.note(f"complete: nothing trained, {spec.resume_point.folder} has the result")
        console.report(summary)
        spec.factories.adopt_weights(spec.resume_point.folder, request.world)
        return summary
    with open_run(request) as run:
        frozen = gc.get_freeze_count()  # by a caller, who wants it to stay so
        if not frozen:
            gc.freeze()  # exempts all that exists now, such as modules, from collections
        gc.enable()
        try:
            status = fit(run)
        finally:
            if not frozen:
                gc.unfreeze()
        summary = finish_run(run, status)
        console.report(summary, spec.source.class_names)
        return summary


def fit(run: Run, *, until: int | None = None) -> str:
    """Train to the end of the plan, to step `until`, to early stopping or an agreed stop; "completed" or "stopped".

    An evaluation that a stop or a crash of an earlier attempt left comes first.
    """
    progress, train = run.progress, run.loaders.train
    run.observer.timer.start()
    if progress.evaluation_pending and conclude(run, stopping=not evaluate_epoch(run)) == "stopped":
        return "stopped"
    while not run.finished and (until is None or progress.step < until):
        batches = run.plan.batches
        epoch, first = divmod(progress.step, batches.steps_per_epoch)
        for tell in run.moments.epoch_begin:
            tell(run)
        run.observer.watchdog.set_position(progress.step, "fetching data")
        for layout, work in train.epoch(batches, epoch, first, run.world.rank, run.strategy.replicas_per_process):
            try:
                outcome = train_step(run, layout, work)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                recover_from_out_of_memory(run, error)
                break  # the same step again, in smaller micro-batches
            if verdict := finish_step(run, outcome):
                if verdict == "stopped":
                    return verdict
                break
    return "completed"


def finish_step(run: Run, outcome: StepResult) -> str:
    """Count the step, log, save and evaluate; returns "finished" or "stopped" if training ends here, else ""."""
    end = run.complete_step()
    log_recovery(run)
    if end.at_epoch_end:
        plan_evaluation(run)
    stopping, pausing, overdue, asked = run.agree_on_requests(end)
    ending = stopping or pausing or run.finished
    if ending or end.at_log_interval:
        log_step(run, outcome)
    due = run.checkpointer.schedule.update_due(end.previous_step, end.step, epoch_ended=end.at_epoch_end)
    if end.savable and (ending or overdue or due):
        save_checkpoint(run)  # before the evaluation, in which the run may be killed
    if end.at_epoch_end and not (stopping and run.progress.evaluation_pending):
        stopping |= not evaluate_epoch(run)
    if run.progress.stopped_early and not (ending or end.at_log_interval):
        log_step(run, outcome)
    verdict = conclude(run, stopping=stopping or pausing)
    if asked and not verdict:
        add_requested_part(run)
    return verdict


def conclude(run: Run, *, stopping: bool) -> str:
    """Return "finished" if the run is, its last evaluation included; else "stopped" if asked to, once that is saved."""
    progress = run.progress
    if run.finished and not progress.evaluation_pending:
        return "finished"
    if not stopping:
        return ""
    if run.checkpointer.saved_step != progress.step:
        save_checkpoint(run)
    run.log.console.note(f"stopped by {run.control.stop.signal or 'a signal to another rank'} at step {progress.step}")
    return "stopped"


def train_step(run: Run, layout: StepLayout, work: Iterator[Batch]) -> StepResult:
    """One optimizer step on the mean loss of its global batch, over samples or tokens; this worker may have no part."""
    observer, state, config, parameters = run.observer, run.state, run.config, run.strategy.local_parameters
    seed, devices = config.reproducibility.seed, run.spec.placement.devices
    run.set_learning_rates(layout.step)
    losses, units = _run_micro_batches(run, layout, work, seed)
    observer.phase("reduction")
    run.strategy.reduce_gradients(idle=not losses)
    factor = run.loss_normalizer.count_units(units, layout.samples)
    if factor is not None and (config.reproducibility.exact or run.moments.after_backward):
        multiply_gradients(parameters, factor)  # --exact keeps this rounding, and a hook is shown the true gradient
        factor = None
    run.checkpointer.writer.wait_for_staging()  # of a checkpoint in flight, before the optimizer changes the weights
    for tell in run.moments.after_backward:
        tell(run, layout.step)
    observer.phase("optimizer")
    if run.optimizer_draws:  # the same on every worker
        seed_optimizer_step(seed, layout.step, *devices)
    max_norm = None if config.optimizer.max_grad_norm == "off" else float(config.optimizer.max_grad_norm)
    total_norm = run.strategy.total_norm
    norm, skipped = state.precision.clip_and_step(state.optimizer, parameters, max_norm, total_norm, factor)
    run.strategy.rollback_buffers(skipped)
    if run.after_step:  # before the average, which moves towards what it leaves
        run.after_step.call(layout.step + 1, skipped, seed, devices)
    if state.average:
        state.average.update_parameters(state.model, skipped)
    outcome = StepResult(layout.micro_batches, losses, run.loss_normalizer.get_step_norm(norm), skipped)
    observer.step_done(outcome, run.loss_normalizer.last)
    for tell_end in run.moments.step_end:
        tell_end(run, layout.step, outcome)
    return outcome


def _run_micro_batches(
    run: Run, layout: StepLayout, work: Iterator[Batch], seed: int
) -> tuple[dict[int, Tensor], list[Tensor | int]]:
    """Add up the gradients of this worker's micro-batches; returns their loss sums by number, and their units."""
    observer, devices = run.observer, run.spec.placement.devices
    divisor = run.loss_normalizer.divisor(layout.samples)
    losses: dict[int, Tensor] = {}
    units: list[Tensor | int] = []
    run.strategy.begin_step(layout.micro_batches)
    if run.after_step:
        run.after_step.begin_step()
    batches = observer.fetch(layout, work)
    if run.task.global_loss:  # they run forward twice: their losses need the rows of all of them
        batches = find_row_gradients(run, layout, batches, observer)
    for batch, last in batches:
        seed_micro_batch(seed, layout.step, batch.micro_batch_index, *devices)
        losses[batch.micro_batch_index] = forward_backward(run, batch, divisor, last=last, observer=observer)
        run.strategy.after_backward(batch.micro_batch_index)
        units.append(run.task.units(batch))
    return losses, units
