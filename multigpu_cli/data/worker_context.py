"""The multiprocessing context of loader processes: they end with their trainer, and their socket paths are short."""

import os
import shutil
import signal
import tempfile
from multiprocessing.context import ForkContext, ForkProcess
from typing import Any

from torch.utils.data import DataLoader

from multigpu_cli.errors import RequestError
from multigpu_cli.runtime.parent_death import die_with_parent

_LONGEST = 107 - len("/pymp-12345678/listener-12345678")  # bytes of a folder: a Unix socket's path has 108, with a zero
_SHORT = ("/tmp", "/dev/shm")  # where TMPDIR is too long


class LoaderContext(ForkContext):
    """The start method of loader processes, for DataLoader's `multiprocessing_context`; `close` removes their sockets.

    torch hands tensors over through Unix sockets, which multiprocessing puts below TMPDIR; a long one breaks them.

    Raises:
        RequestError: no folder has a path that is short enough.
    """

    def __init__(self) -> None:
        self._sockets = tempfile.mkdtemp(prefix="pymp-", dir=_short_folder())  # as multiprocessing calls its own

    def Process(self, *args: Any, **named: Any) -> ForkProcess:  # type: ignore[override]
        return _LoaderProcess(self._sockets, *args, **named)

    def close(self) -> None:
        shutil.rmtree(self._sockets, ignore_errors=True)


class _LoaderProcess(ForkProcess):
    def __init__(self, sockets: str, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._config["tempdir"] = sockets  # type: ignore[attr-defined]  # where multiprocessing looks for it

    def _bootstrap(self, *args: Any, **named: Any) -> int:
        """The first that the new process does.

        Torch starts its own watch later, and with whoever is the parent then: a trainer that was killed in between
        would leave the process behind for ever.
        """
        die_with_parent(self._parent_pid)  # type: ignore[attr-defined]
        return super()._bootstrap(*args, **named)  # type: ignore[misc, no-any-return]


def ignore_group_signals(_: int) -> None:
    """As a `worker_init_fn`: a signal to the whole process group is for the trainer, which still needs its loaders."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def end_processes(loader: DataLoader[Any]) -> None:
    """Not left to the garbage collector: the process may end past it, and its children must not outlive it."""
    if (iterator := loader._iterator) is not None and loader.num_workers:
        iterator._shutdown_workers()  # type: ignore[attr-defined]
        loader._iterator = None
    if isinstance(context := loader.multiprocessing_context, LoaderContext):
        context.close()


def _short_folder() -> str:
    for folder in (tempfile.gettempdir(), *_SHORT):
        if len(os.fsencode(folder)) <= _LONGEST and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise RequestError(
        f"--num-workers: TMPDIR={tempfile.gettempdir()} is too long for the sockets of loader processes, "
        "and /tmp can't be written",
        remedy=f"a TMPDIR of at most {_LONGEST} bytes, or --num-workers 0",
    )
