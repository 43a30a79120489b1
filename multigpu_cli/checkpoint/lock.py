"""Who owns a run folder: one process group at a time."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from multigpu_cli.errors import RequestError


def is_locked(folder: Path) -> bool:
    """Whether another process owns the folder right now."""
    try:
        with open(folder / ".lock") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Make the folder and own it for as long as the context lasts.

    Raises:
        RequestError: it can't be made, or another run is at work in it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "a")  # noqa: SIM115 - held open for as long as the run lasts
    except OSError as error:
        raise RequestError(f"--save-dir {folder}: {error.strerror or error}", remedy="another --save-dir") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise at_work(folder) from error
        yield


def at_work(folder: Path) -> RequestError:
    return RequestError(f"another run is at work in {folder}", remedy="wait for it to end, or use another --save-dir")
