"""The lock of a run folder: one run at a time holds it."""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from multigpu_cli.config.paths import refuse_links
from multigpu_cli.errors import RequestError, TrainingError

_MOMENT = 0.3  # seconds; a process that only tests the lock has released it by then


def is_locked(folder: Path) -> bool:
    """Whether another process holds the lock now; any number of processes may test at once, as the nodes of a job do.

    Raises:
        RequestError: the file system does not support locks.
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
    """Wait for the lock to be released, for at most `patience` seconds; whether it was."""
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
    """Create the folder and hold its lock for the duration of the context.

    Raises:
        RequestError: the folder can't be created or has a link in it, or another run holds its lock.
    """
    refuse_links(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(os.open(folder / ".lock", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666), "a")
    except OSError as error:
        raise RequestError(
            f"--save-dir {folder}: {error.strerror or error}", remedy="use another --save-dir"
        ) from error
    with file:
        _take(file, folder)
        try:
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), _signature().encode())
            os.fsync(file.fileno())  # a full disk fails here, not at the first checkpoint
        except OSError as error:
            raise RequestError(
                f"--save-dir {folder}: {error.strerror or error}", remedy="free some space, or use another --save-dir"
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
    """An id of this process that is unique among the machines that share a disk."""
    return f"{os.uname().nodename} {os.getpid()}"


def read_owner(folder: Path) -> str:
    """The id of the process that holds the lock, or did last, as this machine sees it; "" where there is none."""
    try:
        return (folder / ".lock").read_text()
    except OSError:
        return ""


def check_owner(folder: Path, owner: str = "") -> None:
    """Check that the run folder still belongs to this run: it may have been removed and used by another one.

    Args:
        owner: the process that holds the lock, if it is not this one.

    Raises:
        OSError: the folder was removed, or another process holds its lock.
    """
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "the run folder was removed; create it again", str(folder))
    if (found := read_owner(folder)) and found != (owner or _signature()):
        raise OSError(errno.EBUSY, f"{folder} now belongs to another run")


@contextmanager
def fail_on_write_error(folder: Path) -> Iterator[None]:
    """Turn a failed write inside the context into the error that ends the run.

    Raises:
        TrainingError: the file system refused a write.
    """
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"{folder} can't be written to: {error}",
            remedy="free some space, or repair the folder, and run the same command again: it resumes from the last "
            "checkpoint",
        ) from error


def _no_lock(folder: Path, error: OSError) -> RequestError:
    return RequestError(
        f"{folder}: the file system does not support the lock of a run ({error.strerror or error})",
        remedy="use another --save-dir, for instance on a local disk; NFS needs version 4, or its lock daemon",
    )


def locked_error(folder: Path) -> RequestError:
    return RequestError(f"another run is using {folder}", remedy="wait for it to end, or use another --save-dir")


def still_locked_error(folder: Path) -> TrainingError:
    """The error of a restarted run while a process of its previous attempt, perhaps on a lost node, holds the lock."""
    error = TrainingError(
        f"a process of an earlier attempt is still using {folder}",
        remedy="end that process, which may be on a node that does not answer; torchrun --max-restarts=… tries again",
    )
    error.caused_by_peer = True
    return error
