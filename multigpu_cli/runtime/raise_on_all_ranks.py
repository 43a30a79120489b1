"""Runs work that may fail on one rank and raises its error on all ranks, so that no rank waits for ever."""

from collections.abc import Callable
from typing import TypeVar

from multigpu_cli.errors import OutOfMemory, RequestError, TrainingError
from multigpu_cli.runtime.collectives import all_reduce_max, broadcast_object
from multigpu_cli.runtime.out_of_memory import is_out_of_memory
from multigpu_cli.runtime.world import World

Result = TypeVar("Result")


_KINDS = (TrainingError, RequestError, OutOfMemory)  # the types of errors that are raised on all ranks


def run_on_all_ranks(world: World, work: Callable[[], Result]) -> Result:
    """Run work that may fail on any rank; if it fails, the error of the first such rank is raised on all ranks.

    Without this, the other ranks would wait in the next collective for the rank that failed. `work` itself must not
    communicate.

    Raises:
        OutOfMemory: the device's memory did not suffice.
    """
    error: TrainingError | None = None
    result: Result | None = None
    try:
        result = work()
    except TrainingError as caught:
        error = caught
    except RuntimeError as caught:  # not stored, so that the tensors in its traceback are freed
        if not is_out_of_memory(caught):
            raise
        message = (str(caught).splitlines() or [""])[0]
        error = OutOfMemory(f"rank {world.rank} ran out of memory: {message}", remedy="use a smaller --batch-size")
    failed = world.size - int(all_reduce_max(world, [float(world.size - world.rank) if error else 0.0])[0])
    if failed == world.size:
        return result  # type: ignore[return-value]
    if world.size == 1 and error:
        raise error
    kind = max(number for number, each in enumerate(_KINDS) if isinstance(error, each)) if error else 0
    own = [error.problem, error.remedy, kind, error.caused_by_peer] if error else None
    problem, remedy, kind, caused_by_peer = broadcast_object(world, own, source=failed)
    shared = _KINDS[kind](problem, remedy=remedy)
    shared.shared, shared.caused_by_peer = True, caused_by_peer
    raise shared from error


def run_without_vote(world: World, work: Callable[[], Result]) -> Result:
    """Run work in which all ranks communicate: an error on one rank can't be raised on others, which wait for it.

    Raises:
        TrainingError: this rank ran out of memory; the launcher ends the others.
    """
    try:
        return work()
    except RuntimeError as caught:
        if world.size == 1 or not is_out_of_memory(caught):
            raise
        message = (str(caught).splitlines() or [""])[0]
    raise TrainingError(f"rank {world.rank} ran out of memory: {message}", remedy="use a smaller --batch-size")


def run_on_main_rank(world: World, work: Callable[[], Result], *, by: int = 0) -> Result:
    """Run work on one rank only and broadcast its result (plain values) or its error."""
    answer = run_on_all_ranks(world, lambda: work() if world.rank == by else None)
    return broadcast_object(world, answer, source=by)  # type: ignore[no-any-return]
