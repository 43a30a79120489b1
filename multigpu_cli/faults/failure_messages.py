"""The messages and reports after a crash or a hang: the rank at fault, its position, and the remedy."""

from collections.abc import Sequence
from pathlib import Path

from multigpu_cli.errors import TrainingError
from multigpu_cli.faults.interpret_error import remedy_for
from multigpu_cli.faults.rank_position import RankPosition
from multigpu_cli.faults.rank_status import RankExit
from multigpu_cli.runtime.rank_output import quote_last_lines


def lost_peer_error(exits: Sequence[RankExit], size: int, done: int | None, logs: Path | None = None) -> TrainingError:
    """The error of a rank that only lost its peers: the first root failure, or the ranks that vanished.

    Args:
        exits: how ranks ended, in the order in which they published it.
        size: the world size.
        done: steps done, None before the first of this attempt.
        logs: the folder of the ranks' log files, once training has begun.
    """
    cause = next((end for end in exits if not end.caused_by_peer), None)
    if cause is not None:
        head, *rest = cause.problem.splitlines() or [""]
        problem = "\n".join([f"rank {cause.rank} failed ({cause.place}): {head}", *(f"  {line}" for line in rest[:5])])
        remedy = "" if any("try:" in line for line in rest) else remedy_for(Exception(cause.problem))
        error = TrainingError(problem, remedy=remedy)
        error.exit_code = cause.exit_code
        error.add_note(cause.stack)  # for --debug
    else:
        missing = sorted(set(range(size)) - {end.rank for end in exits})
        who = f"rank {', '.join(map(str, missing))}" if missing else "some rank"
        when = f"after step {done}" if done else "before the first step"
        error = TrainingError(
            f"{who} ended without an error message {when}: was it killed?"
            + "".join(quote_last_lines(logs, rank) for rank in missing[:2]),
            remedy="check dmesg or the scheduler for an out-of-memory kill; "
            "the same command resumes from the last checkpoint",
        )
    error.caused_by_peer = True
    return error


def summary_line(error: BaseException) -> str:
    """The first line of the problem, without the remedy."""
    text = error.problem if isinstance(error, TrainingError) else f"{type(error).__name__}: {error}"
    return text.splitlines()[0] if text else type(error).__name__


def full_report(error: BaseException, exits: Sequence[RankExit]) -> str:
    """The crash report with all stacks; that of the rank at fault comes last, where people look."""
    ordered = sorted(exits, key=lambda end: not end.caused_by_peer)
    parts = [f"{type(error).__name__}: {error}\n"]
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
    head = f"no progress for {seconds:.0f} s"
    if size > 1:
        head += f": rank {names} did not arrive" if names else ": all ranks are at the same position"
    lines = [f"  rank {rank}: does not answer" for rank in silent[:4]]
    lines += [f"  rank {each.rank}: {each}" for each in sorted(positions, key=lambda each: each.order)[:6]]
    where = f"{logs}/stacks_* show the stack of every thread; " if logs else ""
    return TrainingError("\n".join([head, *lines]), remedy=f"{where}a longer --hang-timeout if steps take so long")
