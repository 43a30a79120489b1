"""Errors for the user: the problem, the way out, and the exit code.

Exit codes: 0 done, 1 the training failed, 2 the request was wrong, 75 stopped by a signal with a checkpoint saved.
"""

from collections.abc import Iterable
from difflib import get_close_matches

FAILED, WRONG_REQUEST, STOPPED = 1, 2, 75
GRACE = 3.0  # seconds; the agent ends all ranks as soon as one exits, so the rank with the root cause exits first
STALLED = "no progress for "  # the beginning of what a hang is called
_LISTED = 30  # names in one message at most


class TrainingError(Exception):
    """The training failed for a known reason.

    Args:
        problem: what is wrong, naming the flag, key or file at fault.
        remedy: what the user can do about it.
        shared: it is raised on every rank, so that one of them reports it for all.
        caused_by_peer: it was caused by another rank's end: a retry may succeed.
    """

    exit_code = FAILED
    failed_at: int | None = None  # optimizer steps done; None before the first of this attempt
    rank: int | None = None  # the rank at fault, if it is another one that is known
    is_unexplained = False  # a rank ended without a word; only its launcher can know how

    def __init__(self, problem: str, *, remedy: str = "", shared: bool = False, caused_by_peer: bool = False) -> None:
        super().__init__(problem, remedy)
        self.problem, self.remedy, self.shared, self.caused_by_peer = problem, remedy, shared, caused_by_peer

    def __str__(self) -> str:
        return f"{self.problem}\n  try: {self.remedy}" if self.remedy else self.problem


class RequestError(TrainingError):
    """The request itself is wrong (usage, configuration, data): nothing was touched."""

    exit_code = WRONG_REQUEST


class OutOfMemory(TrainingError):
    """A rank ran out of device memory; raised on every rank."""


class EvaluationStopped(Exception):
    """All ranks leave an evaluation at the same batch, because a signal asked one of them to stop the run."""


def combine_errors(errors: Iterable[TrainingError]) -> RequestError:
    """Several errors of one request as one, each with its own remedy."""
    return RequestError("\n".join(str(error) for error in errors))


def raise_all(errors: Iterable[TrainingError]) -> None:
    """Raise all errors of a request as one, if there are any."""
    if listed := list(errors):
        raise combine_errors(listed) if listed[1:] else listed[0]


def pluralize(count: int | float, noun: str) -> str:
    """'1 worker', '2 workers', '2.5 epochs'."""
    ending = "" if count == 1 else "es" if noun.endswith(("s", "tch")) else "s"
    return f"{count:,} {noun}{ending}" if isinstance(count, int) else f"{count:.4g} {noun}{ending}"


def make_printable(text: str) -> str:
    r"""Return a text in which control characters stand as their escapes, such as \x1b, except line ends and tabs.

    A terminal would obey them, and names and messages may come from a stranger's file. Joiners of letters stay.
    """
    return "".join(
        letter if letter.isprintable() or letter in "\n\t\u200c\u200d" else repr(letter)[1:-1] for letter in text
    )


def make_line(text: str) -> str:
    r"""Return a text in one line: like `make_printable`, but line ends and tabs stand as \n and \t too.

    A text from a stranger's file could otherwise add a line that looks like one of ours, such as an error message.
    """
    return make_printable(text).replace("\n", r"\n").replace("\t", r"\t")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Name the closest known word, or list them if none is close: 'did you mean …?' or 'one of: …'."""
    known = sorted(known)
    close = get_close_matches(word, known, n=1, cutoff=0.6)
    more = f", … ({len(known)} in all)" if len(known) > _LISTED else ""
    return f"did you mean {close[0]!r}?" if close else f"one of: {', '.join(map(make_line, known[:_LISTED]))}{more}"
