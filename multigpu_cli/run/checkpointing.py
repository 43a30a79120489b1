"""How a checkpoint is written while training goes on."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from multigpu_cli.capabilities import PART_STATES
from multigpu_cli.checkpoint.files import check_owner
from multigpu_cli.checkpoint.pieces import Rows
from multigpu_cli.checkpoint.snapshot import Snapshot
from multigpu_cli.checkpoint.store import BestWeights
from multigpu_cli.checkpoint.weights import save_weights
from multigpu_cli.distributed.collectives import all_reduce_max, run_on_all_ranks
from multigpu_cli.errors import TrainingError
from multigpu_cli.faults.replica_check import check_replicas
from multigpu_cli.run.run import Run
from multigpu_cli.strategies.fsdp.save import ShardedSave

_ROWS = "rows"  # where a snapshot has the rows that this rank writes


def save_checkpoint(run: Run) -> None:
    """Copy the state, and write it in the background while training goes on: rank 0, or each rank its rows.

    best.pt is written before the checkpoint is published, so it is never older than the checkpoint says.
    """
    run.observer.watchdog.set_position(run.progress.step, "saving")
    checkpointer = run.checkpointer
    checkpointer.saved_step = run.progress.step
    checkpointer.saves += 1
    with run.observer.timer.pause():
        run.observer.loss.all_reduce_pending()
        state, strategy = run.state, run.strategy
        check_replicas(
            state.model,
            run.world,
            run.progress.step,
            state.optimizer,
            places=strategy.places,
            find_parameter=strategy.find_parameter,
        )
        more, began = run.task.state(run.world), time.perf_counter()
        _finish_pending_on_all_ranks(run)
        for tell in run.moments.saved:
            tell(run)
        whole, rows = _collect_state(run, more)
        if run.world.is_main:
            _save_on_main_rank(run, whole, rows, began)
        elif checkpointer.owner:
            _save_rows(run, rows)
    checkpointer.schedule.mark_saved()


def _save_on_main_rank(run: Run, state: dict[str, Any], rows: dict[str, Rows], began: float) -> None:
    checkpointer, watchdog = run.checkpointer, run.observer.watchdog
    step, best, snapshot = run.progress.step, checkpointer.best, _begin_capture(run, state, rows)
    best_metrics, checkpointer.best_in_flight = dict(run.progress.best), best
    peers = _prepare_sharded_save(run, snapshot, rows) if checkpointer.owner else None
    stalled = time.perf_counter() - began

    def write() -> None:
        check_owner(run.folder)
        weights = run.folder / "best.pt"
        if best is not None:
            checkpointer.best_sha256 = save_weights(
                weights, best, run.spec.weights_metadata(), best_metrics, watchdog.mark_progress
            )
        facts = run.spec.checkpoint_metadata() | {
            "world_size": run.world.size,
            "versions": {"torch": torch.__version__},
        }
        so_far = BestWeights(weights, checkpointer.best_sha256) if best_metrics else None
        whole = {name: value for name, value in snapshot.state.items() if name != _ROWS}
        size = checkpointer.store.save(step, whole, facts, so_far, peers)
        seconds = time.perf_counter() - began
        stall = stalled + checkpointer.writer.waited
        run.log.journal.write("checkpoint", step=step, seconds=seconds, stall_seconds=stall, bytes=size)
        run.log.console.detail(
            f"checkpoint of step {step}: {size / 2**20:.1f} MiB in {seconds:.2f} s, stall {stall:.3f} s"
        )

    checkpointer.in_flight = step
    checkpointer.writer.submit(snapshot.finish, partial(_write_or_abandon, write, peers) if peers else write)
    stalled = time.perf_counter() - began


def _write_or_abandon(write: Callable[[], None], peers: ShardedSave) -> None:
    try:
        write()
    except OSError:
        peers.abandon()
        raise


def _save_rows(run: Run, rows: dict[str, Rows]) -> None:
    """What a rank other than 0 does for a checkpoint to which each writes its rows."""
    snapshot = _begin_capture(run, {"model": {}}, rows)
    run.checkpointer.writer.submit(snapshot.finish, _prepare_sharded_save(run, snapshot, rows).take_part)


def _prepare_sharded_save(run: Run, snapshot: Snapshot, rows: dict[str, Rows]) -> ShardedSave:
    copied = {name: Rows(tensor, rows[name].begin) for name, tensor in snapshot.state[_ROWS].items()}
    checkpointer = run.checkpointer
    return ShardedSave(run.world, checkpointer.store, checkpointer.owner, run.progress.step, copied, checkpointer.saves)


def _finish_pending_on_all_ranks(run: Run) -> None:
    """Wait for the previous checkpoint; rank 0 for the others first, by a collective, which fails if one is gone."""
    if run.checkpointer.owner:
        if not run.world.is_main:
            run.checkpointer.writer.wait()  # rank 0 was told of an error
        all_reduce_max(run.world, [0.0])
    if run.world.is_main:
        finish_pending_checkpoint(run)


def finish_pending_checkpoint(run: Run) -> None:
    """Wait for the previous checkpoint; best weights that could not be written go into the next one."""
    checkpointer = run.checkpointer
    if error := checkpointer.writer.wait():
        run.log_fault("checkpoint", f"a checkpoint was not written ({error}); the next one is tried as planned")
    else:
        checkpointer.written = checkpointer.in_flight
        if checkpointer.best is checkpointer.best_in_flight:
            checkpointer.best = None
    checkpointer.best_in_flight, checkpointer.in_flight = None, checkpointer.written
    for tell in run.moments.written if run.world.is_main else ():
        tell(run)


def _collect_state(run: Run, task: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Rows]]:
    """The state for a checkpoint, with this attempt's seconds in its totals; all ranks call it together.

    Returns:
        what rank 0 writes, and the rows that this rank writes, none unless all do.
    """
    progress = run.progress
    before, progress.train_seconds = progress.train_seconds, progress.train_seconds + run.observer.timer.seconds
    state = run.state.state_dict(task) | {name: {} for name in PART_STATES}
    for collect in run.moments.state_dict:
        state |= collect(run)
    progress.train_seconds = before
    if not run.checkpointer.owner:
        return run.strategy.gather_state(state), {}
    outline, rows = run.strategy.split_state(state)
    return outline, {name: Rows(*each) for name, each in rows.items()}


def _begin_capture(run: Run, state: dict[str, Any], rows: dict[str, Rows]) -> Snapshot:
    """A copy of the state in the previous checkpoint's memory, unless it was gathered, and so copied, already."""
    if run.strategy.sharded and not run.checkpointer.owner:
        return Snapshot(state)
    own = {_ROWS: {name: each.tensor for name, each in rows.items()}} if run.checkpointer.owner else {}
    snapshot = run.state.begin_capture(run.checkpointer.snapshot, state | own)
    run.checkpointer.snapshot = snapshot.state
    return snapshot


def wait_for_last_checkpoint(run: Run) -> None:
    """Wait for the last checkpoint; all ranks call it together.

    Raises:
        TrainingError: it could not be written; earlier ones are as they were. The same on all ranks.
    """
    run_on_all_ranks(run.world, lambda: None if run.world.is_main else _check_written(run))
    run_on_all_ranks(run.world, lambda: _check_written(run))
    run.checkpointer.written = run.checkpointer.in_flight
    for tell in run.moments.saved:
        tell(run)


def _check_written(run: Run) -> None:
    if error := run.checkpointer.writer.wait():
        raise TrainingError(
            f"the last checkpoint could not be written to {run.folder}: {error}",
            remedy="free some space, or repair the folder, and run the same command again: it resumes from the "
            "checkpoint before",
        )
