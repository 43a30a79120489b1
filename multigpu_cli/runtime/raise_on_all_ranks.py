"""Work that may fail on one rank: its error is raised on all of them, so that no rank waits for another for ever."""

from collections.abc import Callable
from typing import TypeVar

from multigpu_cli.errors import OutOfMemory, RequestError, TrainingError
from multigpu_cli.runtime.collectives import all_reduce_max, broadcast_object
from multigpu_cli.runtime.out_of_memory import is_out_of_memory
from multigpu_cli.runtime.world import World

Result = TypeVar("Result")


_KINDS = (TrainingError, RequestError, OutOfMemory)  # of errors that are raised on all ranks


def run_on_all_ranks(world: World, work: Callable[[], Result]) -> Result:
    """Do something that may fail on any rank; if it does anywhere, the first such rank's error is raised everywhere.

    Without this, the ranks that succeeded would wait in the next collective for the one that left. `work` itself must
    not communicate.

    Raises:
        OutOfMemory: the device's memory did not suffice.
    """
    error: TrainingError | None = None
    result: Result | None = None
    try:
        result = work()
    except TrainingError as caught:
        error = caught
    except RuntimeError as caught:  # and with it goes what its traceback holds in that memory
        if not is_out_of_memory(caught):
            raise
        said = (str(caught).splitlines() or [""])[0]
        error = OutOfMemory(f"rank {world.rank} ran out of memory: {said}", remedy="a smaller --batch-size")
    guilty = world.size - int(all_reduce_max(world, [float(world.size - world.rank) if error else 0.0])[0])
    if guilty == world.size:
        return result  # type: ignore[return-value]
    if world.size == 1 and error:
        raise error
    kind = max(number for number, each in enumerate(_KINDS) if isinstance(error, each)) if error else 0
    own = [error.problem, error.remedy, kind, error.caused_by_peer] if error else None
    told = broadcast_object(world, own, source=guilty)
    everywhere = _KINDS[told[2]](told[0], remedy=told[1])
    everywhere.shared, everywhere.caused_by_peer = True, told[3]
    raise everywhere from error


def run_on_main_rank(world: World, work: Callable[[], Result], *, by: int = 0) -> Result:
    """Let rank 0 (or another) alone do something and tell the others its result: plain values, or its error."""
    answer = run_on_all_ranks(world, lambda: work() if world.rank == by else None)
    return broadcast_object(world, answer, source=by)  # type: ignore[no-any-return]
