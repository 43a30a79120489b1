"""The process beside rank 0 that runs the program of --notify: no step waits, and it outlives rank 0; without torch."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event as Ended
from typing import NoReturn

from multigpu_cli.config.regular_files import without_links
from multigpu_cli.distributed.launch_env import with_variables
from multigpu_cli.distributed.processes import serve
from multigpu_cli.errors import FAILED, STALLED, STOPPED
from multigpu_cli.monitor.history import JOURNAL, JournalTail, load_summary
from multigpu_cli.monitor.journal import Event

LOG = "logs/notify.log"  # what the program prints
_LOOK = 0.5  # seconds between two looks at the journal
_PAUSE = 60.0  # seconds between two calls for faults: some come with every step
_LIMIT = 60.0  # seconds for a call
_CODES = {"completed": 0, "stopped": STOPPED, "failed": FAILED}


def follow(run: Path, argv: Sequence[str], begin: int, ended: Ended, note: Callable[[str], None]) -> None:
    """Call the program after faults, and at the end, from byte `begin` of the journal on; `note` takes its failures."""
    faults: list[Event] = []
    end: Event | None = None
    tail, next_call = JournalTail(run / JOURNAL, begin), 0.0
    while True:
        over = ended.wait(_LOOK)
        events = [line.event for line in tail.read() if line.event]
        faults += [event for event in events if event["event"] == "fault" and event.get("kind") != "notify"]
        end = next((event for event in events if event["event"] == "end"), end)
        if faults and (over or time.monotonic() >= next_call):
            more = f" (and {len(faults) - 1} more before)" if faults[1:] else ""
            _call(run, argv, ("fault", f"{faults[-1].get('action')}{more}", ""), note)
            faults, next_call = [], time.monotonic() + _PAUSE
        if over:
            return _call(run, argv, _explain_end(run, end), note)


def _explain_end(run: Path, end: Event | None) -> tuple[str, str, str]:
    """The reason, a message, and the exit code as text; "" where it is not known."""
    if end is None:
        return "died", "the process of rank 0 is gone, and the journal has no end", ""
    reason, message = str(end.get("status")), f"{end.get('status')} at step {end.get('step')}"
    code = str(_CODES.get(reason, ""))
    if reason == "failed":
        message = str(load_summary(run).get("error", message))[:4000]
        reason = "stalled" if STALLED in message else reason
    return reason, message, code


def _call(run: Path, argv: Sequence[str], about: tuple[str, str, str], note: Callable[[str], None]) -> None:
    names = ("MULTIGPU_REASON", "MULTIGPU_MESSAGE", "MULTIGPU_EXIT_CODE", "MULTIGPU_RUN_DIR")
    environ = with_variables(dict(zip(names, (*about, str(run)), strict=True)))
    try:
        with open(run / LOG, "ab", opener=without_links) as log:
            null = subprocess.DEVNULL
            subprocess.run(argv, env=environ, stdin=null, stdout=log, stderr=log, timeout=_LIMIT, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        note(f"--notify ({about[0]}): {error}; what it printed is in {run / LOG}")


def main(arguments: Sequence[str]) -> NoReturn:
    """Follow the run of the request: folder, program and byte, as JSON in the first argument."""
    run, argv, begin = json.loads(arguments[0])
    follow(Path(run), argv, begin, *serve())
    os._exit(0)  # also while a thread still waits for rank 0
