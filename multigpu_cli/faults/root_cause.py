"""Finds the error that ended a run, on this rank or the one that caused it, and words it."""

import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from multigpu_cli.distributed.launch_env import PreviousAttempt, record_end
from multigpu_cli.distributed.processes import quote_last_lines
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import STALLED, RequestError, TrainingError
from multigpu_cli.faults.explain import (
    describe_innermost_line,
    extract_main_thread_stack,
    hide_secrets,
    is_peer_failure,
    name_small_embedding,
    remedy_for,
)
from multigpu_cli.faults.rank_exits import OwnProgress, RankExit, RankExits, RankPosition

PATIENCE = 0.5  # seconds for the exits of other ranks, which are published before their connections close
_LONGER = 2.0  # seconds more if none of them is at fault: a rank that waits in a collective looks once a second
WAITED = "waited for a rank that had ended"
_BUSY = 5.0  # seconds for the other thread to find the cause


class RootCauseFinder:
    """Publishes how this rank failed, and looks among the exits of all ranks for the first failure."""

    def __init__(self, world: World, exits: RankExits, progress: OwnProgress) -> None:
        self._world, self._exits, self._progress = world, exits, progress
        self.found: BaseException | None = None  # the root cause, once it was looked for
        self._lock = threading.Lock()  # one thread reports: the main thread, or the watchdog's, which ends the process

    def find(self, error: BaseException) -> BaseException:
        """The error to raise on this rank for `error`: itself, or that of another rank which caused it."""
        with self._lock:
            if self.found is None:
                self.found = self._publish_and_find(error)
        return self.found

    def publish_lost_peer(self, problem: str = WAITED) -> None:
        """Publish that this rank is alive and may wait for one that has ended; `problem` is what it knows of that."""
        stack = "".join(["Stack of the main thread:\n", *extract_main_thread_stack().format()])
        self._exits.publish(self._describe_exit(problem, stack, caused_by_peer=True))

    def keep_main_thread_from_reporting(self) -> bool:
        """Whether the calling thread may report, and then end the process; not if the main thread has, or does so."""
        if not self._lock.acquire(timeout=_BUSY):
            return False
        if self.found is not None:
            self._lock.release()
        return self.found is None

    def find_for_lost_peer(self) -> TrainingError:
        """The error of a rank that only lost its peers; of those that can still report, the lowest does so."""
        exits = self._exits.wait_for_exits(patience=PATIENCE)
        if all(end.caused_by_peer for end in exits):
            exits = self._exits.wait_for_exits(patience=_LONGER)
        progress = self._progress
        error = lost_peer_error(exits, self._world.size, progress.steps_done(), progress.logs)
        error.failed_at = progress.steps_done()
        without_fault = [end.rank for end in exits if end.caused_by_peer]
        error.shared = min([*without_fault, self._world.rank]) != self._world.rank
        if not error.shared:
            self._report(error, exits)
        return error

    def record(self, text: str) -> None:
        """Leave the cause for the next attempt."""
        done, moved = self._progress.steps_done(), self._progress.last_move
        record_end(self._world.agent_dir, self._world.attempt, PreviousAttempt(text, done, moved))

    def _publish_and_find(self, error: BaseException) -> BaseException:
        only_request = isinstance(error, RequestError) and self._world.size == 1
        if only_request or getattr(error, "shared", False) or not isinstance(error, Exception):
            return error
        error.failed_at = self._progress.steps_done()  # type: ignore[attr-defined]
        name_small_embedding(error)
        own = self._describe_error(error)
        self._exits.publish(own)
        if own.caused_by_peer:
            return self.find_for_lost_peer()
        self._report(error, self._exits.wait_for_exits())
        return error

    def _describe_error(self, error: Exception) -> RankExit:
        known = isinstance(error, TrainingError)
        head = str(error) if known else f"{type(error).__name__}: {error}"
        line = [] if known else [f"in {describe_innermost_line(traceback.extract_tb(error.__traceback__))}"]
        return self._describe_exit(
            hide_secrets("\n".join([head, *getattr(error, "__notes__", ()), *line])),
            hide_secrets("".join(traceback.format_exception(error))),
            caused_by_peer=is_peer_failure(error),
            exit_code=error.exit_code if isinstance(error, TrainingError) else TrainingError.exit_code,
        )

    def _describe_exit(
        self, problem: str, stack: str, *, caused_by_peer: bool, exit_code: int = TrainingError.exit_code
    ) -> RankExit:
        progress = self._progress
        return RankExit(
            rank=self._world.rank,
            place=f"{progress.phase}, {progress.steps} steps done",
            problem=problem,
            stack=stack,
            caused_by_peer=caused_by_peer,
            exit_code=exit_code,
            samples=[] if progress.samples is None else progress.samples.tolist(),
        )

    def _report(self, error: BaseException, exits: list[RankExit]) -> None:
        """Record the error for the next attempt, and write the crash report."""
        self.record(summary_line(error))
        name = f"crash_{self._world.attempt}.txt"
        with suppress(OSError), self._progress.open_report(name) as file:  # the disk itself may have failed
            file.write(full_report(error, exits))


def lost_peer_error(exits: Sequence[RankExit], size: int, done: int | None, logs: Path | None = None) -> TrainingError:
    """The error of a rank that only lost its peers: the first root failure, or the ranks that vanished.

    The exits are in the order in which they were published; before the first step of this attempt `done` is None.
    """
    cause = next((end for end in exits if not end.caused_by_peer), None)
    missing = sorted(set(range(size)) - {end.rank for end in exits})
    if cause is None and not missing:  # each takes another for the cause, so that the first one knows most
        cause = next((end for end in exits if end.problem != WAITED), None)
    if cause is not None:
        head, *rest = cause.problem.splitlines() or [""]
        problem = "\n".join([f"rank {cause.rank} failed ({cause.place}): {head}", *(f"  {line}" for line in rest[:5])])
        remedy = "" if any("try:" in line for line in rest) else remedy_for(Exception(cause.problem))
        error = TrainingError(problem, remedy=remedy)
        error.exit_code, error.rank = cause.exit_code, cause.rank
        error.add_note(cause.stack)  # for --debug
    else:
        who = f"rank {', '.join(map(str, missing))}" if missing else "some rank"
        when = f"after step {done}" if done else "before the first step"
        error = TrainingError(
            f"{who} ended without an error message {when}: was it killed?"
            + "".join(quote_last_lines(logs, rank) for rank in missing[:2]),
            remedy="check dmesg or the scheduler for an out-of-memory kill; "
            "the same command resumes from the last checkpoint",
        )
        error.rank, error.is_unexplained = missing[0] if len(missing) == 1 else None, True
    error.caused_by_peer = True
    return error


def summary_line(error: BaseException) -> str:
    """Return the first line of the problem, without the remedy and without secrets."""
    text = error.problem if isinstance(error, TrainingError) else f"{type(error).__name__}: {error}"
    return hide_secrets(text.splitlines()[0]) if text else type(error).__name__


def full_report(error: BaseException, exits: Sequence[RankExit]) -> str:
    """The crash report with all stacks; that of the rank at fault comes last, where people look."""
    ordered = sorted(exits, key=lambda end: not end.caused_by_peer)
    parts = [hide_secrets(f"{type(error).__name__}: {error}\n")]
    for end in ordered:
        note = " (only lost its peers)" if end.caused_by_peer else ""
        batch = f"samples of its batch: {', '.join(map(str, end.samples[:32]))}\n" if end.samples else ""
        parts.append(f"--- rank {end.rank}{note}: {end.place}\n{batch}{end.stack}")
    return "\n".join(parts)


def hang_error(positions: Sequence[RankPosition], size: int, seconds: float, logs: Path | None) -> TrainingError:
    """The error that names the ranks that did not arrive, and the position of every rank."""
    silent = sorted(set(range(size)) - {position.rank for position in positions})
    furthest = max(position.order for position in positions)
    behind = [position.rank for position in positions if position.order < furthest]
    names = ", ".join(map(str, sorted([*silent, *behind])))
    head = f"{STALLED}{seconds:.0f} s"
    if size > 1:
        head += f": rank {names} did not arrive" if names else ": all ranks are at the same position"
    lines = [f"  rank {rank}: does not answer" for rank in silent[:4]]
    lines += [f"  rank {each.rank}: {each}" for each in sorted(positions, key=lambda each: each.order)[:6]]
    where = f"{logs}/stacks_* show the stack of every thread; " if logs else ""
    error = TrainingError("\n".join([head, *lines]), remedy=f"{where}a longer --hang-timeout if steps take so long")
    error.rank = next(iter([*silent, *behind])) if len([*silent, *behind]) == 1 else None
    return error
