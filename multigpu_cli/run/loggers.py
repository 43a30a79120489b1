"""--logger: sends the journal to experiment loggers, from a process beside rank 0."""

from contextlib import ExitStack
from pathlib import Path

from multigpu_cli.faults.watchdog import Watchdog
from multigpu_cli.monitor.console import Console
from multigpu_cli.monitor.loggers.check import check_loggers
from multigpu_cli.monitor.loggers.process import LoggerProcess
from multigpu_cli.run.components import TrainComponents
from multigpu_cli.run.part import Part
from multigpu_cli.run.spec import RunSpec
from multigpu_cli.runtime.raise_on_all_ranks import run_on_main_rank
from multigpu_cli.runtime.world import World


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
