"""--notify CMD: the user's program, run at the end, after faults and after a stall by a process beside rank 0."""

import json
import shlex
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from multigpu_cli.distributed.processes import Companion
from multigpu_cli.distributed.world import World
from multigpu_cli.faults.watchdog import Watchdog
from multigpu_cli.monitor.console import Console
from multigpu_cli.monitor.history import JOURNAL
from multigpu_cli.notify import process
from multigpu_cli.run.assembly.components import TrainComponents
from multigpu_cli.run.part import Part
from multigpu_cli.run.request.spec import RunSpec
from multigpu_cli.run.run import Run

_PATIENCE = 10.0  # seconds that the end of a run waits for the program; after that it goes on alone


class Notify(Part):
    """The process of --notify, seen from rank 0; a program that fails is a fault in the journal."""

    def __init__(self, spec: RunSpec, world: World) -> None:
        """A rule has found the program."""
        self._argv = shlex.split(str(spec.config.fault.notify))
        self._finish: Callable[[], None] = lambda: None
        self._warn: Callable[[str], None]

    def follow_journal(
        self, components: TrainComponents, console: Console, watchdog: Watchdog, stack: ExitStack
    ) -> Any:
        run, self._warn = Path(components.spec.resume_point.folder).absolute(), console.warn
        begin = (run / JOURNAL).stat().st_size if (run / JOURNAL).exists() else 0
        request = json.dumps([str(run), self._argv, begin])
        try:
            (run / process.LOG).parent.mkdir(exist_ok=True)
            companion = Companion(process.__name__, [request], lambda line: self._warn(line))
        except OSError as error:
            console.warn(f"no process for --notify ({error}); training continues without")
            return None

        def finish() -> None:
            until, self._finish = time.monotonic() + _PATIENCE, lambda: None

            def waits() -> bool:
                watchdog.mark_progress()
                return time.monotonic() < until

            companion.end(waits)

        self._finish = finish
        stack.callback(lambda: self._finish())
        return lambda event: companion.relay()  # one read that does not wait

    def start(self, run: Run, stack: ExitStack) -> None:
        self._warn = partial(run.log_fault, "notify")

    def end(self, run: Run, summary: Any) -> None:
        """The journal has its end, which the process reads, and is still open for what it says."""
        self._finish()
