"""Who owns a run folder: one process group at a time."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from multigpu_cli.errors import RequestError, TrainingError


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
        try:
            _sign(file.fileno())
        except OSError as error:
            raise RequestError(
                f"--save-dir {folder}: {error.strerror or error}", remedy="make room, or another --save-dir"
            ) from error
        yield


def _sign(file: int) -> None:
    """Say whose it is; a disk that is full shows now, not at the first checkpoint."""
    os.ftruncate(file, 0)
    os.write(file, str(os.getpid()).encode())
    os.fsync(file)


def check_ours(folder: Path) -> None:
    """Whoever removes the folder of a run at work may start another one there: that one is left alone.

    Raises:
        OSError: the folder has gone, or the lock in it is another process's.
    """
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "the run folder has gone; make it again", str(folder))
    lock = folder / ".lock"
    if lock.exists() and (owner := lock.read_text()) and owner != str(os.getpid()):
        raise OSError(errno.EBUSY, f"{folder} belongs to another run by now")


@contextmanager
def needed(folder: Path) -> Iterator[None]:
    """What is written here must be written, or the run has failed.

    Raises:
        TrainingError: the file system refused.
    """
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"{folder} can't be written to: {error}",
            remedy="make room, or mend the folder, and run the same command again: it goes on from the last checkpoint",
        ) from error


def at_work(folder: Path) -> RequestError:
    return RequestError(f"another run is at work in {folder}", remedy="wait for it to end, or use another --save-dir")
