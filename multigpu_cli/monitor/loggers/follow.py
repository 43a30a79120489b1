"""The process beside rank 0 that follows the journal and sends it to the loggers; it imports them, and no torch.

It ends by itself: when the run has ended, or rank 0 is gone, it has some seconds to send the rest.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from multigpu_cli.monitor.loggers.sender import Sender
from multigpu_cli.runtime.companion import accompany

_LOOK = 0.1  # seconds


def follow(request: dict[str, Any], ended: threading.Event, note: Callable[[str], None]) -> None:
    """Send the journal to all loggers, each in a thread, until everything has arrived or time is up.

    Args:
        request: run, loggers, wait, again, replay: as `LoggerProcess` writes it.
        ended: the run has.
        note: takes lines to the user; the position file has the errors too.
    """
    replay = bool(request["replay"])
    if replay:
        ended.set()
    run, again, tries = Path(request["run"]), bool(request["again"]), 1 if replay else 3
    senders = [
        Sender(run, name, ended, note, again=again, tries=tries, waits=not replay) for name in request["loggers"]
    ]
    for sender in senders:
        sender.start()
    ended.wait()
    began = time.monotonic()
    while any(sender.is_alive() for sender in senders):
        since = max([began, *(sender.moved for sender in senders)]) if replay else began
        if time.monotonic() - since > request["wait"]:
            return
        time.sleep(_LOOK)


def main(arguments: Sequence[str]) -> NoReturn:
    """Follow the journal that the request, JSON in the first argument, names."""
    follow(json.loads(arguments[0]), *accompany())
    os._exit(0)  # past a library's exit handlers, which may wait for a server
