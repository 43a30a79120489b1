"""The multiprocessing context of loader processes, which end with the trainer and use short socket paths."""

import os
import shutil
import signal
import tempfile
from multiprocessing.context import ForkContext, ForkProcess
from typing import Any

from torch.utils.data import DataLoader

from multigpu_cli.errors import RequestError
from multigpu_cli.runtime.parent_death import die_with_parent

_LONGEST = 107 - len("/pymp-12345678/listener-12345678")  # bytes: the path of a Unix socket has 108, with a final zero
_SHORT = ("/tmp", "/dev/shm")  # used if TMPDIR is too long


class LoaderContext(ForkContext):
    """The start method of loader processes, for DataLoader's `multiprocessing_context`; `close` removes their sockets.

    torch passes tensors through Unix sockets, which multiprocessing creates below TMPDIR; a long path breaks them.

    Raises:
        RequestError: no writable folder has a path that is short enough.
    """

    def __init__(self) -> None:
        self._sockets = tempfile.mkdtemp(prefix="pymp-", dir=_short_folder())  # the prefix of multiprocessing itself

    def Process(self, *args: Any, **named: Any) -> ForkProcess:  # type: ignore[override]
        return _LoaderProcess(self._sockets, *args, **named)

    def close(self) -> None:
        shutil.rmtree(self._sockets, ignore_errors=True)


class _LoaderProcess(ForkProcess):
    def __init__(self, sockets: str, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._config["tempdir"] = sockets  # type: ignore[attr-defined]  # multiprocessing reads it from here

    def _bootstrap(self, *args: Any, **named: Any) -> int:
        """Run in the new process, before anything else.

        Torch starts its own parent check later, on the parent at that time: if the trainer was killed in between, this
        process would never end.
        """
        die_with_parent(self._parent_pid)  # type: ignore[attr-defined]
        return super()._bootstrap(*args, **named)  # type: ignore[misc, no-any-return]


def ignore_group_signals(_: int) -> None:
    """A `worker_init_fn`: a signal to the process group is meant for the trainer, which still needs its loaders."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def end_processes(loader: DataLoader[Any]) -> None:
    """End a loader's processes now: garbage collection may never happen, and they must not outlive this process."""
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
        "and /tmp is not writable",
        remedy=f"set TMPDIR to a path of at most {_LONGEST} bytes, or use --num-workers 0",
    )
