"""The lock of a run folder, which one run at a time owns."""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from multigpu_cli.errors import RequestError, TrainingError

_MOMENT = 0.3  # seconds; whoever only asks has let go by then


def is_locked(folder: Path) -> bool:
    """Whether another process owns the folder right now; any number may ask at once, as the nodes of a job do.

    Raises:
        RequestError: the file system has no locks.
    """
    try:
        with open(folder / ".lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError as error:
        raise _no_lock(folder, error) from error
    return False


def wait_until_unlocked(folder: Path, *, patience: float) -> bool:
    """Whether nobody owns the folder any more; waits so long (seconds) for that."""
    until = time.monotonic() + patience
    while is_locked(folder):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def check_unlocked(folder: Path) -> None:
    """Raises RequestError where another run is at work in the folder, as `lock_folder` does, and leaves no trace."""
    if not wait_until_unlocked(folder, patience=_MOMENT):
        raise locked_error(folder)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
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
        _take(file, folder)
        try:
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), _signature().encode())
            os.fsync(file.fileno())  # a full disk shows now, not at the first checkpoint
        except OSError as error:
            raise RequestError(
                f"--save-dir {folder}: {error.strerror or error}", remedy="make room, or another --save-dir"
            ) from error
        yield


def _take(file: IO[str], folder: Path) -> None:
    until = time.monotonic() + _MOMENT
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > until:
                raise locked_error(folder) from error
            time.sleep(0.02)
        except OSError as error:
            raise _no_lock(folder, error) from error
        else:
            return


def _signature() -> str:
    """This process, as no other is called on the machines that share a disk."""
    return f"{os.uname().nodename} {os.getpid()}"


def check_owner(folder: Path) -> None:
    """Whoever removes the folder of a run at work may start another one there: that one is left alone.

    Raises:
        OSError: the folder has gone, or the lock in it is another process's.
    """
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "the run folder has gone; make it again", str(folder))
    lock = folder / ".lock"
    if lock.exists() and (owner := lock.read_text()) and owner != _signature():
        raise OSError(errno.EBUSY, f"{folder} belongs to another run by now")


@contextmanager
def fail_on_write_error(folder: Path) -> Iterator[None]:
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


def _no_lock(folder: Path, error: OSError) -> RequestError:
    return RequestError(
        f"{folder}: its file system refuses the lock of a run ({error.strerror or error})",
        remedy="another --save-dir, on a disk of this machine, say; NFS needs version 4, or its lock daemon",
    )


def locked_error(folder: Path) -> RequestError:
    return RequestError(f"another run is at work in {folder}", remedy="wait for it to end, or use another --save-dir")


def still_locked_error(folder: Path) -> TrainingError:
    """For a run that is started again while a process of its own, on a node that was cut off or froze, lives on."""
    error = TrainingError(
        f"a process of an earlier attempt is still at work in {folder}",
        remedy="end it, perhaps on a node that does not answer; torchrun --max-restarts=… tries again",
    )
    error.caused_by_peer = True
    return error
