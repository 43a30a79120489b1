"""The rules of --hook, beside what only an import shows."""

from collections.abc import Iterator

from multigpu_cli.config.code_names import find_entry_errors, parse_hook
from multigpu_cli.config.rules import Rule
from multigpu_cli.config.schema import Config
from multigpu_cli.errors import RequestError


def _hooks(config: Config) -> Iterator[RequestError]:
    entries = [parse_hook(text) for text in config.hook.names]
    for _, code in entries:
        if ":" not in code:
            problem = f"--hook {code}: must be module:Class"
            yield RequestError(problem, remedy=f"--hook my_file:{code} for {code} in my_file.py")
    yield from find_entry_errors("hook", entries, config, "Class")


RULES = (Rule("hook hook.args", _hooks),)
