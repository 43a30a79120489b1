"""What people read after a crash or a hang: the first failing rank, where it stood, and the way out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from multigpu_cli.errors import TrainingError
from multigpu_cli.faults.diagnose import remedy_for
from multigpu_cli.faults.rank_failures import RankExit
from multigpu_cli.runtime.rank_output import quote_last_lines


class HasPosition(Protocol):
    """A rank and where it stands."""

    @property
    def rank(self) -> int: ...

    @property
    def order(self) -> tuple[int, int]: ...


def lost_peer_error(ends: Sequence[RankExit], size: int, done: int | None, logs: Path | None = None) -> TrainingError:
    """The error of a rank that only lost others: the first end that is nobody's consequence, or who left no word.

    Args:
        ends: what the ranks said, in the order they came.
        size: ranks in all.
        done: steps done, None before the first of this attempt.
        logs: the folder of the ranks' files, once training has begun.
    """
    cause = next((end for end in ends if not end.consequence), None)
    if cause is not None:
        head, *rest = cause.problem.splitlines() or [""]
        problem = "\n".join([f"rank {cause.rank} failed ({cause.place}): {head}", *(f"  {line}" for line in rest[:5])])
        remedy = "" if any("try:" in line for line in rest) else remedy_for(Exception(cause.problem))
        error = TrainingError(problem, remedy=remedy)
        error.exit_code = cause.exit_code
        error.add_note(cause.stack)  # for --debug
    else:
        missing = sorted(set(range(size)) - {end.rank for end in ends})
        who = f"rank {', '.join(map(str, missing))}" if missing else "some rank"
        when = f"after step {done}" if done else "before the first step"
        error = TrainingError(
            f"{who} ended without a word {when}: killed?"
            + "".join(quote_last_lines(logs, rank) for rank in missing[:2]),
            remedy="look for the kernel's out-of-memory killer (dmesg) or the scheduler's; "
            "the same command again goes on from the last checkpoint",
        )
    error.consequence = True
    return error


def summary_line(error: BaseException) -> str:
    """The problem without the way out."""
    text = error.problem if isinstance(error, TrainingError) else f"{type(error).__name__}: {error}"
    return text.splitlines()[0] if text else type(error).__name__


def full_report(error: BaseException, ends: Sequence[RankExit]) -> str:
    """The whole report; the guilty rank's stack stands last, where people look."""
    ordered = sorted(ends, key=lambda end: not end.consequence)
    parts = [f"{type(error).__name__}: {error}\n"]
    for end in ordered:
        note = " (only lost the others)" if end.consequence else ""
        batch = f"samples of its batch: {', '.join(map(str, end.samples[:32]))}\n" if end.samples else ""
        parts.append(f"--- rank {end.rank}{note}: {end.place}\n{batch}{end.stack}")
    return "\n".join(parts)


def hang_error(places: Sequence[HasPosition], size: int, seconds: float, logs: Path | None) -> TrainingError:
    """Who did not arrive, and where everyone stands."""
    silent = sorted(set(range(size)) - {place.rank for place in places})
    furthest = max(place.order for place in places)
    behind = [place for place in places if place.order < furthest]
    names = ", ".join(str(rank) for rank in sorted([*silent, *(place.rank for place in behind)]))
    head = f"no progress for {seconds:.0f} s"
    if size > 1:
        head += f": rank {names} did not arrive" if names else ": all ranks stand in the same place"
    lines = [f"  rank {rank}: does not answer" for rank in silent[:4]]
    lines += [f"  rank {place.rank}: {place}" for place in sorted(places, key=lambda place: place.order)[:6]]
    where = f"{logs}/stacks_* say what every thread was doing; " if logs else ""
    return TrainingError("\n".join([head, *lines]), remedy=f"{where}a longer --hang-timeout if steps may take so long")
