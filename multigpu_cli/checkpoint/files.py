"""Atomic file writes (a temporary file is written, flushed and renamed), and the lock of a run folder."""

import errno
import fcntl
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, BinaryIO

from multigpu_cli.config.regular_files import open_new, open_regular, read_small, refuse_links, without_links
from multigpu_cli.errors import RequestError, TrainingError

PIECE = 32 * 2**20  # bytes per read or write; each one counts as progress for the hang watchdog

Moved = Callable[[], None]  # called after each chunk that is read or written, so that the hang watchdog sees progress


def ignore_progress() -> None:
    """The default where no watchdog runs."""


def publish(path: Path, content: bytes, moved: Moved = ignore_progress, mode: int = 0o666) -> None:
    """Write `path` atomically: a reader sees the complete old or new content, even if this process is killed."""
    publish_stream(path, lambda file: file.write(content), len(content), moved, mode)


def publish_stream(
    path: Path, write: Callable[["DraftFile"], object], size: int, moved: Moved = ignore_progress, mode: int = 0o666
) -> dict[str, Any]:
    """Publish content that is written in chunks; `size` bytes are reserved on the disk before the first chunk.

    `mode` holds the permissions of the file, less the process's umask. Returns size and SHA-256, as a manifest lists
    them. Raises OSError if a write failed, whatever the writer made of that.
    """
    # a name that nobody can guess: several ranks may write the same file, and others may plant links in the folder
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.draft")
    try:
        with open_new(draft, mode) as file:
            if size:
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk fails before the first byte is written
            written = DraftFile(file, moved)
            try:
                write(written)
            except RuntimeError as error:  # torch.save only reports an inconsistent archive
                if written.error:
                    raise written.error from error
                raise
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:  # also of what gives the content
        draft.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)
    moved()
    return {"size": written.size, "sha256": written.sum.hexdigest()}


class DraftFile:
    """A file that is flushed to disk after each chunk, which counts as progress."""

    def __init__(self, file: BinaryIO, moved: Moved) -> None:
        self._file, self._moved, self._since = file, moved, 0
        self.size, self.sum = 0, sha256()  # of what was written
        self.error: OSError | None = None  # of a failed write

    def write(self, content: bytes | memoryview) -> int:
        view = memoryview(content).cast("B")
        try:
            for begin in range(0, len(view), PIECE):
                self._since += self._file.write(view[begin : begin + PIECE])
                if self._since >= PIECE:
                    self._file.flush()
                    os.fsync(self._file.fileno())
                    self._since = 0
                    self._moved()
        except OSError as error:
            self.error = error
            raise
        self.sum.update(view)
        self.size += len(view)
        return len(view)

    def flush(self) -> None:
        """Nothing to do: each chunk is flushed, and so is the end."""


def compute_sha256(file: Path, moved: Moved = ignore_progress) -> str:
    """SHA-256 of a file, read in chunks."""
    digest = sha256()
    with open(file, "rb") as content:
        while piece := content.read(PIECE):
            digest.update(piece)
            moved()
    return digest.hexdigest()


def sign_cache(content: "hashlib._Hash", facts: object) -> str:
    """Return the checksum of a file that is made once and read back: of its content, whose digest is given, and facts.

    `facts` are plain values. The checksum detects damage; it does not prove who wrote the file.
    """
    content.update(json.dumps(facts, sort_keys=True).encode())
    return content.hexdigest()


def remove_drafts(folder: Path) -> None:
    """Remove the drafts of processes that were killed."""
    for draft in folder.glob(".*.draft"):
        draft.unlink()


def flush_folder(folder: Path) -> None:
    """Make renames in a folder survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_MOMENT = 0.3  # seconds; a process that only tests the lock has released it by then


def is_locked(folder: Path) -> bool:
    """Whether another process holds the lock now; any number of processes may test at once, as the nodes of a job do.

    RequestError: the file system does not support locks.
    """
    if (folder / ".lock").is_symlink():
        refuse_links(folder)
    try:
        with open_regular(folder / ".lock") as file:
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
    """Raise RequestError if another run holds the folder's lock, as `lock_folder` does, but leave no trace."""
    if not wait_until_unlocked(folder, patience=_MOMENT):
        raise locked_error(folder)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Create the folder, and hold its lock; RequestError: it can't be made, has a link in it, or another run has it."""
    refuse_links(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "a", opener=without_links)  # noqa: SIM115 - closed below
    except OSError as error:
        problem = f"--save-dir {folder}: {error.strerror or error}"
        raise RequestError(problem, remedy="use another --save-dir") from error
    with file:
        until = time.monotonic() + _MOMENT
        try:
            if not take_lock(file, lambda: time.monotonic() > until):
                raise locked_error(folder)
        except OSError as error:
            raise _no_lock(folder, error) from error
        try:
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), _signature().encode())
            os.fsync(file.fileno())  # a full disk fails here, not at the first checkpoint
        except OSError as error:
            problem = f"--save-dir {folder}: {error.strerror or error}"
            raise RequestError(problem, remedy="free some space, or use another --save-dir") from error
        yield


def take_lock(file: IO[str], is_over: Callable[[], bool]) -> bool:
    """Take the lock of an open file, and wait for it until `is_over`; whether it is taken, until the file is closed.

    OSError: the file system does not support locks.
    """
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if is_over():
                return False
            time.sleep(0.05)


def _signature() -> str:
    """An id of this process that is unique among the machines that share a disk."""
    return f"{os.uname().nodename} {os.getpid()}"


def read_owner(folder: Path) -> str:
    """Return the id of the process that holds the lock, or held it last, as this machine sees it; "" if unknown."""
    try:
        return read_small(folder / ".lock").decode(errors="replace")
    except OSError:
        return ""


def check_owner(folder: Path, owner: str = "") -> None:
    """Raise an OSError unless the run folder is there and still belongs to this run, or to `owner`."""
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "the run folder was removed; create it again", str(folder))
    if (found := read_owner(folder)) and found != (owner or _signature()):
        raise OSError(errno.EBUSY, f"{folder} now belongs to another run")


@contextmanager
def fail_on_write_error(folder: Path) -> Iterator[None]:
    """Turn a failed write inside the context into the TrainingError that ends the run."""
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"{folder} can't be written to: {error}",
            remedy="free some space, or repair the folder, and run the same command again: it resumes from the last "
            "checkpoint",
        ) from error


def _no_lock(folder: Path, error: OSError) -> RequestError:
    problem = f"{folder}: the file system does not support the lock of a run ({error.strerror or error})"
    remedy = "use another --save-dir, for instance on a local disk; NFS needs version 4, or its lock daemon"
    return RequestError(problem, remedy=remedy)


def locked_error(folder: Path) -> RequestError:
    return RequestError(f"another run is using {folder}", remedy="wait for it to end, or use another --save-dir")


def still_locked_error(folder: Path) -> TrainingError:
    """The error of a restarted run while a process of its previous attempt, perhaps on a lost node, holds the lock."""
    remedy = "end that process, which may be on a node that does not answer; torchrun --max-restarts=… tries again"
    return TrainingError(f"a process of an earlier attempt is still using {folder}", remedy=remedy, caused_by_peer=True)
