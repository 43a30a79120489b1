"""The user's own logger, `--logger module:Class`, behind the interface of the sender."""

from collections.abc import Sequence

from multigpu_cli.errors import RequestError
from multigpu_cli.monitor.loggers.base import Ending, Logger, Row, RunIdentity
from multigpu_cli.runtime.factories import find_factory

_METHODS = ("open", "log", "close")


def check_own_logger(name: str) -> None:
    """Import a logger class, and check that it has the methods.

    Raises:
        RequestError: there is no such class, or a method is missing.
    """
    _find_class(name)


class OwnLogger:
    """Calls an object of the user's class."""

    confirms_each = True

    def __init__(self, name: str) -> None:
        self._logger: Logger = _find_class(name)()

    def open(self, run: RunIdentity, sent: int) -> int:
        self._logger.open(run.id, dict(run.config))
        return sent

    def send(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._logger.log(row.step, row.numbers)

    def finish(self, ending: Ending) -> None:
        self._logger.close()


def _find_class(name: str) -> type[Logger]:
    found = find_factory(name, {}, flag="--logger")
    if missing := [method for method in _METHODS if not callable(getattr(found, method, None))]:
        raise RequestError(
            f"--logger {name}: it has no method {' and no '.join(missing)}",
            remedy="a class with open(run_id, config), log(step, numbers) and close(): docs/guide/loggers.md",
        )
    return found  # type: ignore[return-value]
