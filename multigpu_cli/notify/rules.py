"""The rules of --notify: its program exists before a run starts, and no address holds a password."""

import shlex
import shutil
from collections.abc import Iterator

from multigpu_cli.config.code_names import has_password
from multigpu_cli.config.rules import Rule
from multigpu_cli.config.schema import Config
from multigpu_cli.errors import RequestError


def _notify(config: Config) -> Iterator[RequestError]:
    if has_password(config.fault.notify):
        yield RequestError(
            "--notify: an address with a password, which would be written into config.yaml",
            remedy="leave the password out, and let the program read it from the environment or a file of its own",
        )
    elif config.fault.notify is not None and shutil.which(program := shlex.split(config.fault.notify)[0]) is None:
        yield RequestError(f"--notify {program}: there is no such program", remedy="its path, or one that PATH has")


RULES = (Rule("notify", _notify),)
