"""Functions that open files in folders into which others may write: a file there is data, and may be a trap.

A link could lead a write to another file, a FIFO blocks its reader until somebody writes, and a device never ends.
Small files of run folders, studies and indexes are read by `read_small`; new files are created by `open_new`.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from multigpu_cli.errors import RequestError, make_line

FOLDERS = ("checkpoints", "loggers", "logs", "report", "tensorboard")  # in a run folder: all that is written below it
SMALL = 64 * 2**20  # bytes; a plan, summary, state or manifest has kilobytes


def open_new(path: Path, mode: int = 0o666) -> BinaryIO:
    """Create a file for writing, with permissions `mode` less the umask; a link is never followed.

    Raises FileExistsError if anything of that name exists, be it a link that leads nowhere.
    """
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode), "wb")


class NotRegularFile(OSError):
    """A link, a FIFO, a socket, a device or a folder, in place of a file: another try finds the same."""


def without_links(path: str, flags: int) -> int:
    """Open a log or a lock that may exist, as the `opener` of `open`; a link is not followed, a FIFO not waited for.

    Raises NotRegularFile if the path exists but is of another type, even one that can be written to.
    """
    # O_NONBLOCK, because opening a FIFO waits for the other end; it has no effect on regular files
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):  # a link; a FIFO or a socket; a folder
            what = "a symbolic link, not a regular file" if error.errno == errno.ELOOP else "not a regular file"
            raise NotRegularFile(error.errno, what, path) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegularFile(errno.EINVAL, "not a regular file", path)
    return descriptor


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; a link is not followed, and a FIFO or a device is not waited for.

    Raises OSError if there is no such file; NotRegularFile if it is of another type.
    """
    return os.fdopen(without_links(str(path), os.O_RDONLY), "rb")


def refuse_special_file(path: Path, flag: str = "--data") -> None:
    """Check that a data file can be read more than once; a missing file is accepted here.

    Opening a FIFO waits for a writer, and a device may never end. RequestError names the file, after `flag`.
    """
    if path.exists() and stat.S_IFMT(path.stat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
        problem = f"{flag}: {path} is a FIFO, a socket or a device"
        raise RequestError(problem, remedy="a regular file: each process reads the data by itself, and more than once")


def read_small(path: Path, limit: int = SMALL) -> bytes:
    """Read a regular file of at most `limit` bytes.

    Raises OSError if there is no such file, if it is of another type, or if it is larger.
    """
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit:,} bytes", str(path))
    return content


def is_trusted(file: BinaryIO, owner: int) -> bool:
    """Return whether only this user, root or the user id `owner` could have written an open file."""
    status = os.fstat(file.fileno())
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return not others_write and status.st_uid in {os.geteuid(), 0, owner}


class UnsafeFolder(RequestError):
    """A run folder has a symbolic link in it."""


def refuse_links(run: Path) -> None:
    """Check that nothing that a run writes in its folder is a symbolic link, before anything is written or removed.

    The folder itself may be one, and W&B's own links stay, which lead to its other files beside them. What a run never
    writes may be anything: folders that are not its own, as a project has them that is its --save-dir. UnsafeFolder:
    names the link: what is done to the file would be done to another, somewhere else.
    """
    of_wandb = run / "loggers" / "wandb"
    for place, folders, files in os.walk(run):
        if Path(place) == run:
            folders[:] = [name for name in folders if name in FOLDERS]
        for path in (Path(place, name) for name in (*folders, *files)):
            if not path.is_symlink():
                continue
            inside = Path(os.path.realpath(path)).is_relative_to(os.path.realpath(of_wandb))
            if not (inside and of_wandb in path.parents):
                link = make_line(str(path))
                raise UnsafeFolder(
                    f"{link} is a symbolic link: nothing in a run folder is written or removed through one",
                    remedy="replace it by what it leads to, or remove it; the run folder itself may be a link",
                )
