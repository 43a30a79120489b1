"""The interfaces of loggers: `Logger` for the user's own class, `Destination` for what the sender talks to."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class RunIdentity(NamedTuple):
    """What a logger is told of a run, once.

    Attributes:
        id: 16 hexadecimal digits, the same in every attempt of the run, on any number of workers.
        name: that of the run folder.
        folder: the run folder, as an absolute path.
        project: the recipe's name, or the dataset's.
        config: every setting by its key, passwords in addresses left out.
        began: Unix time of the first attempt.
    """

    id: str
    name: str
    folder: str
    project: str
    config: Mapping[str, Any]
    began: float


class Row(NamedTuple):
    """The numbers of one line of the journal.

    Attributes:
        line: its number in the journal, counted from 1.
        step: the optimizer step.
        time: Unix time.
        numbers: name → value, such as train/loss, val/accuracy, system/samples_per_second.
    """

    line: int
    step: int
    time: float
    numbers: dict[str, float]


class Ending(NamedTuple):
    """What a logger is told when an attempt has ended.

    Attributes:
        status: completed, stopped or failed; killed if the journal has no end.
        fingerprint: SHA-256 of the final weights of a completed run, or "".
        checkpoint: the newest checkpoint, as a path within the run folder, or "".
        files: path within the run folder → SHA-256, of that checkpoint's files and the best weights.
    """

    status: str
    fingerprint: str
    checkpoint: str
    files: Mapping[str, str]


class Logger(Protocol):
    """What `--logger module:Class` names: a class, called without arguments in a process of its own.

    An error in a method is shown once; the rows that were not taken over come again, after `open` of a new object.
    """

    def open(self, run_id: str, config: dict[str, Any]) -> None:
        """Begin, or go on with, a run: the same `run_id` comes again after a restart."""

    def log(self, step: int, numbers: dict[str, float]) -> None:
        """Take over the numbers of a step, until they are safe; a step may come again: the last counts."""

    def close(self) -> None:
        """The attempt has ended."""


class Destination(Protocol):
    """One logger, as the sender sees it. Any method may raise any error: the sender tries again, from `open`.

    Attributes:
        confirms_each: what `send` was given has arrived when it returns; otherwise, when `finish` returns.
    """

    confirms_each: bool

    def open(self, run: RunIdentity, sent: int) -> int:
        """Find the run, or create it.

        Args:
            sent: bytes of the journal that have arrived, as far as is known here.

        Returns:
            From which byte on the journal is wanted: 0 if the run is not there.
        """

    def send(self, rows: Sequence[Row]) -> None:
        """Send rows, in the journal's order."""

    def finish(self, ending: Ending) -> None:
        """The attempt has ended, and all its rows were sent."""
