"""The process beside rank 0 that follows the journal and sends it to the loggers; it imports them, and no torch.

It is in a session of its own: no terminal, no torchrun and no signal to the run reaches it. It ends by itself: rank 0
writes into the pipe on its stdin, or is gone, and from then on it has some seconds to send the rest.
"""

import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from multigpu_cli.monitor.loggers.sender import Sender

_LOOK = 0.1  # seconds
_NICE = 10  # less of a busy machine's time than a training gets


def follow(request: dict[str, Any], pipe: int, notes: int) -> None:
    """Send the journal to all loggers, each in a thread, until everything has arrived or time is up.

    Args:
        request: run, loggers, wait, again, replay: as `LoggerProcess` writes it.
        pipe: file descriptor that can be read when the run has ended.
        notes: file descriptor for lines to the user; nobody may read them any more.
    """

    def note(text: str) -> None:
        with suppress(OSError):  # a reader that is gone, or does not read: the position file has the error too
            os.write(notes, (text.replace("\n", " ") + "\n").encode())

    ended, replay = threading.Event(), bool(request["replay"])
    if replay:
        ended.set()
    run, again, tries = Path(request["run"]), bool(request["again"]), 1 if replay else 3
    senders = [Sender(run, name, ended, note, again=again, tries=tries) for name in request["loggers"]]
    for sender in senders:
        sender.start()
    if not replay:
        wait_for_end(pipe)
        ended.set()
    began = time.monotonic()
    while any(sender.is_alive() for sender in senders):
        since = max([began, *(sender.moved for sender in senders)]) if replay else began
        if time.monotonic() - since > request["wait"]:
            return
        time.sleep(_LOOK)


def wait_for_end(pipe: int) -> None:
    """Wait until something is in the pipe, its other end is closed, or this process has lost its parent."""
    parent = os.getppid()
    while os.getppid() == parent:
        readable, _, _ = select.select([pipe], [], [], 1.0)
        if readable:
            return


def main(arguments: Sequence[str]) -> NoReturn:
    """Follow the journal that the request, JSON in the first argument, names."""
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(each, _ignore)  # a job's manager may signal all processes; the run's end decides
    os.nice(_NICE)
    pipe, notes, null = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):  # a library may read, or print
        os.dup2(null, number)
    os.set_blocking(notes, False)
    follow(json.loads(arguments[0]), pipe, notes)
    os._exit(0)  # past a library's exit handlers, which may wait for a server


def _ignore(number: int, frame: FrameType | None) -> None:
    """Nothing: a handler, for one that is ignored would be ignored in a library's own processes too."""


if __name__ == "__main__":
    main(sys.argv[1:])
