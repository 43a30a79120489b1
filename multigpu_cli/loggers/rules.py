"""The rules of --logger: known names, installed packages, and no password in any setting."""

from collections.abc import Iterator
from importlib.util import find_spec

from multigpu_cli.capabilities import LOGGERS
from multigpu_cli.config.code_names import has_password
from multigpu_cli.config.rules import Rule
from multigpu_cli.config.schema import SETTINGS, Config
from multigpu_cli.config.types import OWN_CODE
from multigpu_cli.errors import RequestError, did_you_mean


def _loggers(config: Config) -> Iterator[RequestError]:
    """What is wrong with the loggers of a request; nothing of theirs is imported."""
    for name in config.log.loggers:
        if name in LOGGERS:
            if find_spec(name) is None:  # package and extra have its name
                yield RequestError(
                    f"--logger {name} needs the package {name}", remedy=f"pip install 'multigpu-cli[{name}]'"
                )
        elif ":" not in name:
            remedy = f"{did_you_mean(name, LOGGERS)} (or your own as module:Class)"
            yield RequestError(f"--logger {name}: unknown name", remedy=remedy)
        elif not OWN_CODE.fullmatch(name):
            yield RequestError(
                f"--logger {name}: must be module:Class", remedy="use --logger my_file:Log for class Log in my_file.py"
            )
    if config.log.loggers:
        for key, entry in SETTINGS.items():
            if has_password(config.get(key)):
                problem = f"{entry.flag or key}: an address with a password, which --logger would send on"
                yield RequestError(problem, remedy="leave the password out, and read it from the environment")


RULES = (Rule("logger", _loggers),)
