"""--logger and `log RUN --to`: send the journal to experiment loggers, from a process beside rank 0 or afterwards."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from multigpu_cli.config.regular_files import refuse_links
from multigpu_cli.config.schema import Config, LogConfig
from multigpu_cli.config.types import loggers as logger_names
from multigpu_cli.distributed.world import World, run_on_main_rank
from multigpu_cli.errors import RequestError, TrainingError, pluralize
from multigpu_cli.faults.watchdog import Watchdog
from multigpu_cli.loggers.base import check_loggers
from multigpu_cli.loggers.sender import LoggerProcess, hold_lock, list_unsent, read_position
from multigpu_cli.monitor.console import Console
from multigpu_cli.monitor.history import JOURNAL
from multigpu_cli.run.assembly.components import TrainComponents
from multigpu_cli.run.part import Part
from multigpu_cli.run.request.spec import RunSpec


class Loggers(Part):
    """The loggers of a run; what they need is checked on rank 0 alone."""

    def __init__(self, spec: RunSpec, world: World) -> None:
        self._settings = spec.config.log
        run_on_main_rank(world, lambda: check_loggers(spec.config))

    def plan_notes(self) -> dict[str, str | list[str]]:
        return {"loggers": f"{', '.join(self._settings.loggers)}, from the journal, in a process beside rank 0"}

    def follow_journal(
        self, components: TrainComponents, console: Console, watchdog: Watchdog, stack: ExitStack
    ) -> LoggerProcess | None:
        """Start the process that follows the journal; a machine that can't start one trains without."""
        names, folder = self._settings.loggers, Path(components.spec.resume_point.folder)
        try:
            process = LoggerProcess(
                folder, names, self._settings.logger_wait, console.warn, alive=watchdog.mark_progress
            )
        except OSError as error:
            again = " ".join(f"--to {name}" for name in names)
            console.warn(f"no process for the loggers ({error}); afterwards: multigpu log {folder} {again}")
            return None
        stack.callback(process.close)
        return process


_PATIENCE = 120.0  # seconds without progress; importing a logger may take half a minute


def send_journal(run: str, to: Sequence[str], *, again: bool) -> dict[str, Any]:
    """Send what has not arrived, or all again; returns the run, and the bytes of the journal that each logger has.

    RequestError: there is no such run or logger, the run has a link in it, or another process is sending it.
    TrainingError: something was not sent.
    """
    folder, names = Path(run), _parse_names(to)
    if not (folder / JOURNAL).is_file():
        raise RequestError(f"{run}: not a run folder, since it has no {JOURNAL}", remedy="the --save-dir of a run")
    refuse_links(folder)
    for name in names:
        with hold_lock(folder, name, lambda: True) as held:
            if not held:
                problem = f"{run} is already being sent to {name} by another process"
                raise RequestError(problem, remedy="wait for the end of the run, and try again")
    notes: list[str] = []
    LoggerProcess(folder, names, _PATIENCE, notes.append, again=again, replay=True).close()
    if unsent := list_unsent(folder, names):
        lines = [f"{each.logger}: {pluralize(n, 'line')} not sent ({each.error or 'no answer'})" for each, n in unsent]
        raise TrainingError("\n".join(lines), remedy="run the same command again: it continues from there")
    if notes:
        raise TrainingError("\n".join(notes), remedy="the same command again")
    return {"run": run, "sent_bytes": {name: read_position(folder, name).sent for name in names}}


def format_sent(sent: dict[str, Any]) -> list[str]:
    """One line for each logger."""
    return [f"{name} has all of {sent['run']}" for name in sent["sent_bytes"]]


def _parse_names(to: Sequence[str]) -> tuple[str, ...]:
    """The loggers of --to, each known and fit for use."""
    names = logger_names.read(list(to), "--to")
    if not names:
        raise RequestError("--to names no logger", remedy="--to mlflow, wandb or module:Class")
    check_loggers(replace(Config(), log=LogConfig(loggers=names)))
    return tuple(names)
