"""The heart: settle a request, assemble the parts, and train. Every strategy, dataset and task runs through `step`."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from multigpu_cli.checkpoint.lock import owned
from multigpu_cli.config.schema import Config
from multigpu_cli.data.loader import Batch
from multigpu_cli.errors import RequestError, TrainingError
from multigpu_cli.faults.stop import StopRequest
from multigpu_cli.faults.watch import LONG, Watch
from multigpu_cli.monitor.console import Console
from multigpu_cli.run import ending, record
from multigpu_cli.run.learner import build_learner
from multigpu_cli.run.parts import Outcome, Run, assemble
from multigpu_cli.run.rehearsal import rehearse
from multigpu_cli.run.returning import note_recovery
from multigpu_cli.run.rhythm import Rhythm
from multigpu_cli.run.settle import Settled, settle
from multigpu_cli.runtime.collectives import decided, gathered
from multigpu_cli.runtime.determinism import be_deterministic, be_fast, seed_micro_batch
from multigpu_cli.runtime.devices import Choice
from multigpu_cli.runtime.memory import is_out_of_memory
from multigpu_cli.runtime.world import Rendezvous, World, joined

if TYPE_CHECKING:
    from multigpu_cli.run.brought import Brought


def run(
    config: Config,
    choice: Choice,
    meeting: Rendezvous | None,
    console: Console,
    *,
    last_words: Callable[[TrainingError], None],
    dry_run: bool = False,
    brought: "Brought | None" = None,
) -> dict[str, Any]:
    """Carry out one request on this process's device; returns the summary, or the plan of a dry run.

    Args:
        choice: strategy and devices.
        meeting: the launcher's facts, None in a world of one.
        console: speaks on rank 0; the other ranks' is silent.
        last_words: tells the user why a run that hangs is ended (see Watch).
        brought: live objects in place of what the config names; the model is left with the weights for use.

    Raises:
        RequestError: the request is wrong; nothing was written.
        TrainingError: the training failed; summary.json says so.
    """
    began = time.perf_counter()
    with ExitStack() as stack:
        settled, guards = _settled(config, choice, meeting, last_words, stack, brought)
        if settled.nothing_to_do and not dry_run:
            console.note(f"{settled.start.folder} is complete: nothing to do")
            console.report(settled.start.summary or {})
            if brought:
                brought.recall(settled.start.folder, guards.world)
            return settled.start.summary or {}
        if dry_run:
            console.plan(settled.plan.rows(), "Plan")
            console.data(settled.plan.as_dict())
            return settled.plan.as_dict()
        parts, notes = _assembled(settled, choice, guards, console, stack)
        parts.progress.startup_seconds += time.perf_counter() - began
        return _trained(parts, notes, last_attempt=guards.world.restarts_left <= 0)


def set_up(
    config: Config,
    choice: Choice,
    meeting: Rendezvous | None,
    console: Console,
    stack: ExitStack,
    *,
    last_words: Callable[[TrainingError], None],
    brought: "Brought",
) -> Run:
    """The same up to the first step, for somebody who calls `fit` or `step` and `after` themselves.

    Args:
        stack: whoever closes it ends the run.

    Raises:
        RequestError: the request is wrong, or the folder holds a completed run; nothing was written.
    """
    began = time.perf_counter()
    settled, guards = _settled(config, choice, meeting, last_words, stack, brought)
    if settled.nothing_to_do:
        raise RequestError(f"{settled.start.folder} is complete", remedy="another --save-dir, or more --epochs")
    run, notes = _assembled(settled, choice, guards, console, stack)
    run.progress.startup_seconds += time.perf_counter() - began
    record.open_run(run, notes)
    return run


class _Guards(NamedTuple):
    """What is there before anything is settled: the other ranks, and who listens and watches meanwhile."""

    world: World
    stop: StopRequest
    watch: Watch


def _settled(
    config: Config,
    choice: Choice,
    meeting: Rendezvous | None,
    last_words: Callable[[TrainingError], None],
    stack: ExitStack,
    brought: "Brought | None",
) -> tuple[Settled, _Guards]:
    """Meet the other ranks and settle the request with them."""
    patience = choice.timeout or max(LONG, config.fault.hang_timeout)
    world = stack.enter_context(joined(meeting, choice.devices[0], timeout=patience, backend=choice.backend))
    stop = stack.enter_context(StopRequest())
    watch = stack.enter_context(Watch(world, config.fault.hang_timeout, last_words))
    settled = settle(config, choice, world, brought=brought)
    if settled.config.reproducibility.exact:
        be_deterministic()
    else:
        be_fast(world.device)
    return settled, _Guards(world, stop, watch)


def _assembled(
    settled: Settled, choice: Choice, guards: _Guards, console: Console, stack: ExitStack
) -> tuple[Run, list[str]]:
    """The parts, rehearsed, in a folder that is ours; and what went wrong in the rehearsal, and was mended."""
    learner = build_learner(settled, choice, guards.world)
    notes = rehearse(learner)
    console.plan(learner.plan.rows(), "Plan")
    folder = stack.enter_context(ExitStack())
    decided(guards.world, lambda: folder.enter_context(owned(Path(settled.start.folder))))
    return assemble(learner, console, guards.stop, guards.watch, stack), notes


def _trained(run: Run, notes: list[str], *, last_attempt: bool) -> dict[str, Any]:
    """Fit, conclude, and leave a summary whichever way it ends.

    Args:
        notes: what went wrong in the rehearsal, and was mended.
        last_attempt: nobody starts it again if it fails, so this summary is the one that --json prints.
    """

    def failed(error: BaseException) -> None:
        found = ending.fail(run, error)
        if last_attempt:
            run.console.data(found)

    run.watch.on_end = failed
    try:
        record.open_run(run, notes)
        gc.freeze()  # modules and the like never become garbage: no collection in the loop goes through them again
        gc.enable()
        status = fit(run)
        end = ending.conclude(run) if status == "completed" else ending.leave(run)
    except BaseException as error:
        ending.name_unused(run, error)
        reason = run.watch.explained(error)
        failed(reason)
        raise reason from (None if reason is error else error)
    finally:
        gc.unfreeze()
        run.bar.close()
    end["peak_memory_bytes"] = [int(peak) for peak in gathered(run.world, record.peak_memory_here(run))]
    found = ending.summary(run, status, end)
    ending.close_run(run, found)
    run.console.report(found, found.get("per_class"), found.get("confusion"), run.settled.source.class_names)
    return found


def fit(run: Run, every: Rhythm | None = None, *, until: int | None = None) -> str:
    """Train until the planned steps are done, nothing improves any more, or somebody asks us to stop.

    Args:
        every: when checkpoints are due, of a loop that goes on.
        until: the end of an epoch, in steps, at which somebody else wants to have a say.
    """
    progress, every = run.progress, every or Rhythm(run.config.checkpoint)
    run.meters.begin()
    while not run.finished and (until is None or progress.step < until):
        batches = run.plan.batches
        epoch, first = divmod(progress.step, batches.steps_per_epoch)
        run.watch.at(progress.step, "fetching data")
        for work in run.train.epoch(batches, epoch, first, run.world.rank, run.strategy.lanes):
            try:
                outcome = step(run, progress.step, work)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                record.survive_out_of_memory(run, error)
                break  # the same step again, in smaller micro-batches
            verdict = after(run, outcome, every)
            if verdict == "stopped":
                return verdict
            if verdict:
                break
    return "completed"


def after(run: Run, outcome: Outcome, every: Rhythm) -> str:
    """At the edge of a step: count, log, judge and save; "", or why training ends here: finished or stopped."""
    progress, batches, total = run.progress, run.plan.batches, run.plan.schedule.total_steps
    before, progress.step = progress.step, min(total, run.train.follows(progress.step, batches))
    run.meters.step(batches.samples_in(before % batches.steps_per_epoch))
    run.bar.update(progress.step)
    if run.before:
        note_recovery(run)
    interval = run.config.log.interval
    logged = progress.step // interval > before // interval or progress.step == total
    if logged:
        record.log_step(run, outcome)
    epoch_ended = progress.step % batches.steps_per_epoch == 0 or progress.step == total
    if epoch_ended:
        record.judge(run)
    finished = run.finished
    edge = epoch_ended or not run.train.whole_epochs
    run.watch.at(progress.step, "agreeing")
    wishes = (run.stop.signal is not None, every.overdue())
    stopping, late = run.agreement.on(progress.step, wishes) if edge else (False, False)
    if (stopping or finished) and not logged:
        record.log_step(run, outcome)
    due = every.due(before, progress.step, epoch_ended=epoch_ended)
    if edge and (stopping or late or finished or due):
        record.save(run)
        every.saved()
    if finished:
        return "finished"
    if stopping:
        run.console.note(f"stopped by {run.stop.signal or 'a signal to another rank'} at step {progress.step}")
        return "stopped"
    return ""


def step(run: Run, number: int, work: Iterator[Batch]) -> Outcome:
    """One optimizer step on the mean loss of its global batch: over its samples, or its tokens.

    Args:
        number: the step, counted from 0 over the whole run.
        work: this worker's micro-batches; there may be none.
    """
    batches, strategy = run.plan.batches, run.strategy
    in_epoch = number % batches.steps_per_epoch
    samples, passes = batches.samples_in(in_epoch), batches.passes(in_epoch, run.world.rank, strategy.lanes)
    run.set_rates(number)
    everyone = -(-batches.count_in(in_epoch) // strategy.lanes)
    losses: dict[int, Tensor] = {}
    fetched: list[Tensor] = []
    counted: list[Tensor | int] = []
    strategy.begin(everyone)
    for _ in passes:
        run.watch.at(number, "fetching data")
        with run.meters.waiting("data_wait"):
            batch = next(work)
        run.watch.at(number, "forward", batch.indices)
        seed_micro_batch(run.config.reproducibility.seed, number, batch.index, *run.choice.devices)
        last = len(fetched) == len(passes) - 1
        with strategy.accumulating(last=last):
            with run.precision.autocast():
                value = run.task.loss_sum(strategy.callable, batch)
            run.watch.at(number, "last backward" if last else "backward", batch.indices)
            run.precision.backward(value, strategy.loss_factor / run.units.expected(samples))
        if run.noise.wants(number + 1, len(passes), len(fetched) + 1):
            run.noise.look(run.trained)
        strategy.micro_batch_done(batch.index)
        losses[batch.index] = value.detach()
        fetched.append(batch.indices)
        counted.append(run.task.units(batch))
    run.watch.at(number, "reduction")
    strategy.finish(idle=not passes)
    run.units.settle(counted, samples, run.trained)
    run.writer.let_copy()
    run.watch.at(number, "optimizer")
    norm, skipped = run.precision.commit(run.kept.optimizer, run.trained, _limit(run.config))
    strategy.undo(skipped)
    if run.kept.average:
        run.kept.average.update_parameters(run.kept.model)
    run.nonfinite.note(number, skipped)
    run.tally.add(number, everyone, losses, run.units.last)
    if run.trace:
        run.trace.write(number + 1, fetched)
    return Outcome(everyone, losses, norm, skipped)


def _limit(config: Config) -> float | None:
    return None if config.optimizer.max_grad_norm == "off" else float(config.optimizer.max_grad_norm)
