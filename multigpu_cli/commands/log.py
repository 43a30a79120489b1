"""log: sends what has not arrived of a run's journal to loggers; twice gives the same rows; without torch."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from multigpu_cli.config import rules
from multigpu_cli.config.paths import refuse_links
from multigpu_cli.config.schema import Config, LogConfig
from multigpu_cli.config.types import loggers as logger_names
from multigpu_cli.errors import RequestError, TrainingError, combine_errors, pluralize
from multigpu_cli.monitor.history import JOURNAL
from multigpu_cli.monitor.loggers.check import check_loggers
from multigpu_cli.monitor.loggers.position import hold_lock, read_position
from multigpu_cli.monitor.loggers.process import LoggerProcess, list_unsent
from multigpu_cli.monitor.loggers.registry import PACKAGES

_PATIENCE = 120.0  # seconds without progress; importing a logger may take half a minute


def send_journal(run: str, to: Sequence[str], *, again: bool) -> dict[str, Any]:
    """Send what has not arrived; returns the run, the loggers, and the bytes of the journal that each has.

    Args:
        to: names of loggers, or module:Class.
        again: send from the beginning.

    Raises:
        RequestError: there is no such run or logger, the run has a link in it, or another process is sending it.
        TrainingError: something was not sent.
    """
    folder, names = Path(run), _parse_names(to)
    if not (folder / JOURNAL).is_file():
        raise RequestError(f"{run}: no run, for it has no {JOURNAL}", remedy="the --save-dir of a run")
    refuse_links(folder)
    for name in names:
        with hold_lock(folder, name, lambda: True) as held:
            if not held:
                raise RequestError(
                    f"{run} is being sent to {name} just now", remedy="wait for the end of the run, and try again"
                )
    notes: list[str] = []
    LoggerProcess(folder, names, _PATIENCE, notes.append, again=again, replay=True).close()
    if unsent := list_unsent(folder, names):
        lines = [f"{each.logger}: {pluralize(n, 'line')} not sent ({each.error or 'no answer'})" for each, n in unsent]
        raise TrainingError("\n".join(lines), remedy="the same command again: it goes on from there")
    if notes:
        raise TrainingError("\n".join(notes), remedy="the same command again")
    return {"run": run, "sent_bytes": {name: read_position(folder, name).sent for name in names}}


def format_sent(sent: dict[str, Any]) -> list[str]:
    """One line for each logger."""
    return [f"{name} has all of {sent['run']}" for name in sent["sent_bytes"]]


def _parse_names(to: Sequence[str]) -> tuple[str, ...]:
    """The loggers of --to.

    Raises:
        RequestError: one is unknown, or can't be used.
    """
    try:
        names = logger_names.parse(list(to))
    except ValueError as error:
        raise RequestError(f"--to {error}") from error
    if not names:
        raise RequestError("--to names no logger", remedy="--to mlflow, wandb or module:Class")
    config = replace(Config(), log=LogConfig(loggers=names))
    if errors := rules.find_rule_errors(config, rules.RuleContext(loggers=PACKAGES), only="logger"):
        raise combine_errors(errors)
    check_loggers(config)
    return tuple(names)
