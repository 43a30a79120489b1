"""How a checkpoint is written while training goes on."""

import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch

from multigpu_cli.capabilities import PART_STATES
from multigpu_cli.checkpoint.files import check_owner
from multigpu_cli.checkpoint.pieces import State
from multigpu_cli.checkpoint.snapshot import Snapshot
from multigpu_cli.checkpoint.store import BestWeights, Peers
from multigpu_cli.checkpoint.weights import save_weights
from multigpu_cli.distributed.world import run_on_all_ranks
from multigpu_cli.errors import TrainingError
from multigpu_cli.faults.replica_check import check_replicas
from multigpu_cli.run.run import Run


def save_checkpoint(run: Run) -> None:
    """Copy the state, and write it in the background while training goes on; all ranks call it together.

    At the end of an epoch the checkpoint is written before the evaluation, and `save_evaluation` adds the result. A run
    that resumes from a checkpoint without the result makes the evaluation first. best.pt is never older than a
    checkpoint says.
    """
    run.observer.watchdog.set_position(run.progress.step, "saving")
    checkpointer = run.checkpointer
    checkpointer.saved_step = run.progress.step
    with run.observer.timer.pause():
        run.observer.loss.all_reduce_pending()
        state, strategy = run.state, run.strategy
        check_replicas(
            state.model,
            run.world,
            run.progress.step,
            state.optimizer,
            num_shards=strategy.num_shards,
            find_parameter=strategy.find_parameter,
        )
        more, began = run.task.state(run.world), time.perf_counter()
        checkpointer.saver.wait()
        if run.world.is_main:
            finish_pending_checkpoint(run)
        for tell in run.moments.saved:
            tell(run)
        snapshot = checkpointer.saver.capture(state, _collect_state(run, more), run.progress.step)
        if snapshot:
            _save_on_main_rank(run, snapshot, began)
    checkpointer.schedule.mark_saved()


def _save_on_main_rank(run: Run, snapshot: Snapshot, began: float) -> None:
    checkpointer = run.checkpointer
    step, best, peers = run.progress.step, checkpointer.best, snapshot.peers
    best_metrics, stalled = dict(run.progress.best), time.perf_counter() - began

    def write() -> None:
        check_owner(run.folder)
        so_far = _write_best(run, best, best_metrics, peers)
        where = {"world_size": run.world.size, "versions": {"torch": torch.__version__}}
        facts = run.spec.checkpoint_metadata() | where
        size = checkpointer.store.save(step, snapshot.state, facts, so_far, peers)
        seconds = time.perf_counter() - began
        stall = stalled + checkpointer.writer.waited
        run.log.journal.write("checkpoint", step=step, seconds=seconds, stall_seconds=stall, bytes=size)
        outcome = f"{size / 2**20:.1f} MiB in {seconds:.2f} s"
        run.log.console.detail(f"checkpoint of step {step}: {outcome}, stall {stall:.3f} s")

    checkpointer.in_flight = step
    checkpointer.writer.submit(snapshot.finish, partial(_write_or_abandon, write, peers) if peers else write)
    stalled = time.perf_counter() - began


def save_evaluation(run: Run) -> None:
    """Add what an evaluation changed to the checkpoint of its step, in the background; all ranks call it together.

    New best weights are written to best.pt first, also if this attempt has saved no checkpoint of this step.
    """
    checkpointer, step = run.checkpointer, run.progress.step
    best, metrics, state = checkpointer.best, dict(run.progress.best), {}
    # every rank knows whether this evaluation was the best, and all of them or none share their rows
    peers = checkpointer.saver.share_best(step) if metrics.get("step") == step else None
    if checkpointer.saved_step == step:
        state = _collect_state(run, run.task.state(run.world))
        state = deepcopy({name: state[name] for name in ("progress", "task", *PART_STATES)})

    def write() -> None:
        check_owner(run.folder)
        so_far = _write_best(run, best, metrics, peers)
        if state:
            checkpointer.store.add_evaluation(step, state, so_far)

    if run.world.is_main and (best or state):
        checkpointer.writer.add(partial(_write_or_abandon, write, peers) if peers else write)


def _write_best(run: Run, best: State, metrics: dict[str, float], peers: Peers | None) -> BestWeights | None:
    """Write weights to best.pt, unless that was done, and free their memory; return the best so far, if any.

    `peers` complete weights of which each rank holds rows.
    """
    weights, mark = run.folder / "best.pt", run.observer.watchdog.mark_progress
    if best:
        complete = peers.complete_best(best) if peers else best
        run.checkpointer.best_sha256 = save_weights(weights, complete, run.spec.weights_metadata(), metrics, mark)
        best.clear()
    return BestWeights(weights, run.checkpointer.best_sha256) if metrics else None


def _write_or_abandon(write: Callable[[], None], peers: Peers) -> None:
    try:
        write()
    except OSError:
        peers.abandon()
        raise


def finish_pending_checkpoint(run: Run) -> None:
    """Wait for the previous checkpoint; best weights that could not be written go into the next one."""
    checkpointer = run.checkpointer
    if error := checkpointer.writer.wait():
        run.log_fault("checkpoint", f"a checkpoint was not written ({error}); the next one is tried as planned")
    else:
        checkpointer.written = checkpointer.in_flight
    checkpointer.in_flight = checkpointer.written
    for tell in run.moments.written if run.world.is_main else ():
        tell(run)


def _collect_state(run: Run, task: dict[str, Any]) -> dict[str, Any]:
    """The state for a checkpoint, with this attempt's seconds in its totals; all ranks call it together."""
    progress = run.progress
    before, progress.train_seconds = progress.train_seconds, progress.train_seconds + run.observer.timer.seconds
    state = run.state.state_dict(task) | {name: {} for name in PART_STATES}
    for collect in run.moments.state_dict:
        state |= collect(run)
    progress.train_seconds = before
    return state


def wait_for_last_checkpoint(run: Run) -> None:
    """Wait for the last checkpoint, all ranks together; a TrainingError on each of them if it was not written."""
    run_on_all_ranks(run.world, lambda: None if run.world.is_main else _check_written(run))
    run_on_all_ranks(run.world, lambda: _check_written(run))
    run.checkpointer.written = run.checkpointer.in_flight
    for tell in run.moments.saved:
        tell(run)


def _check_written(run: Run) -> None:
    if error := run.checkpointer.writer.wait():
        problem = f"the last checkpoint could not be written to {run.folder}: {error}"
        remedy = "free some space, or repair the folder, and run the same command again"
        raise TrainingError(problem, remedy=f"{remedy}: it resumes from the checkpoint before")
