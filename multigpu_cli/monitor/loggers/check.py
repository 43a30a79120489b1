"""Checks the loggers of a run before anything is written: packages are there, and classes of the user's own fit."""

from multigpu_cli.config.logger_rules import find_logger_errors
from multigpu_cli.config.schema import Config
from multigpu_cli.errors import combine_errors
from multigpu_cli.monitor.loggers.registry import PACKAGES


def check_loggers(config: Config) -> None:
    """Look for the packages of the built-in loggers, and import the user's own classes.

    Raises:
        RequestError: some logger can't be used; all of them are named.
    """
    if errors := list(find_logger_errors(config, PACKAGES)):
        raise combine_errors(errors)
    for name in config.log.loggers:
        if ":" in name:
            from multigpu_cli.monitor.loggers.own_logger import check_own_logger  # late: few runs have one

            check_own_logger(name)
