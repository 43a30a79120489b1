"""The interfaces of loggers: `Logger` for the user's own class, `Destination` for the sender; names and checks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from multigpu_cli.capabilities import LOGGERS
from multigpu_cli.config import rules
from multigpu_cli.config.schema import Config
from multigpu_cli.errors import RequestError, raise_all
from multigpu_cli.runtime.factories import find_factory


class RunIdentity(NamedTuple):
    """What a logger is told of a run, once."""

    id: str  # 16 hexadecimal digits, the same in every attempt of the run, on any number of workers
    name: str  # that of the run folder
    folder: str  # the run folder, as an absolute path
    project: str  # the recipe's name, or the dataset's
    config: Mapping[str, Any]  # every setting by its key, passwords in addresses left out
    began: float  # Unix time of the first attempt


class Row(NamedTuple):
    """The numbers of one line of the journal."""

    line: int  # its number in the journal, counted from 1
    step: int  # the optimizer step
    time: float  # Unix time
    numbers: dict[str, float]  # name → value, such as train/loss, val/accuracy, system/samples_per_second


class Ending(NamedTuple):
    """What a logger is told when an attempt has ended."""

    status: str  # completed, stopped or failed; killed if the journal has no end
    fingerprint: str  # SHA-256 of the final weights of a completed run, or ""
    checkpoint: str  # the newest checkpoint, as a path within the run folder, or ""
    files: Mapping[str, str]  # path within the run folder → SHA-256, of that checkpoint's files and the best weights


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
    """One logger, as the sender sees it. Any method may raise any error: the sender tries again, from `open`."""

    confirms_each: bool  # what `send` was given has arrived when it returns; otherwise, when `finish` returns

    def open(self, run: RunIdentity, sent: int) -> int:
        """Find the run, or create it.

        Of the journal so many bytes have been `sent`, as far as is known here. Returns from which byte on it is wanted:
        0 if the run is not there.
        """

    def send(self, rows: Sequence[Row]) -> None:
        """Send rows, in the journal's order."""

    def finish(self, ending: Ending) -> None:
        """The attempt has ended, and all its rows were sent."""


def find_logger(name: str) -> Callable[[], Destination]:
    """The factory of a logger's destination: a built-in one, or the user's own class, which must have the methods."""
    found = find_factory(name, LOGGERS, flag="--logger")
    if name in LOGGERS:
        return found
    if missing := [method for method in ("open", "log", "close") if not callable(getattr(found, method, None))]:
        problem = f"--logger {name}: it has no method {' and no '.join(missing)}"
        raise RequestError(problem, remedy="a class with open(run_id, config), log(step, numbers) and close()")
    return lambda: OwnLogger(found())


class OwnLogger:
    """Calls an object of the user's class."""

    confirms_each = True

    def __init__(self, logger: Logger) -> None:
        self._logger = logger

    def open(self, run: RunIdentity, sent: int) -> int:
        self._logger.open(run.id, dict(run.config))
        return sent

    def send(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._logger.log(row.step, row.numbers)

    def finish(self, ending: Ending) -> None:
        self._logger.close()


def check_loggers(config: Config) -> None:
    """Look for the packages of the built-in loggers, and import the user's own classes; the error names all lacks."""
    raise_all(rules.find_rule_errors(config, only="logger"))
    for name in config.log.loggers:
        if name not in LOGGERS:
            find_logger(name)
