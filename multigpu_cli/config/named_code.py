"""Metrics and hooks as settings name them: NAME, module:Class, or NAME=module:Class, and the rules for them."""

import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

from multigpu_cli.config.schema import Config
from multigpu_cli.errors import RequestError, did_you_mean

_PLACE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_TAKEN = {"event", "time", "epoch", "step", "split", "samples", "loss"}  # fields of an `eval` line


class NamedCode(NamedTuple):
    """Code with the name under which results, arguments and state are kept.

    Attributes:
        code: a registry's name, or module:attribute.
    """

    name: str
    code: str


def parse_metric(text: str) -> NamedCode:
    """A metric; without a name of its own it has that of its function, or of its class in snake_case."""
    named = parse_hook(text)
    own = "=" in text or ":" not in text
    return named if own else named._replace(name=re.sub(r"(?<=[a-z\d])(?=[A-Z])", "_", named.name).lower())


def parse_hook(text: str) -> NamedCode:
    """A hook; without a name of its own it has that of its class."""
    name, equals, code = text.partition("=")
    code = code if equals else text
    return NamedCode(name.strip() if equals else re.split(r"[:.]", code)[-1], code.strip())


def find_metric_errors(config: Config, known: Collection[str]) -> Iterator[RequestError]:
    """What is wrong with --metric, beside what only an import shows.

    Args:
        known: the built-in metrics.
    """
    entries = [parse_metric(text) for text in config.metric.names]
    for name, code in entries:
        if ":" not in code and code not in known:
            remedy = f"{did_you_mean(code, known)} (or your own as module:function)"
            yield RequestError(f"--metric {code}: unknown name", remedy=remedy)
        elif name in _TAKEN:
            yield RequestError(f"--metric {code}: {name!r} is taken", remedy=f"--metric NAME={code}")
    yield from _find_entry_errors("metric", entries, config, "function")


def find_hook_errors(config: Config) -> Iterator[RequestError]:
    """What is wrong with --hook, beside what only an import shows."""
    entries = [parse_hook(text) for text in config.hook.names]
    for _, code in entries:
        if ":" not in code:
            yield RequestError(
                f"--hook {code}: must be module:Class", remedy=f"--hook my_file:{code} for {code} in my_file.py"
            )
    yield from _find_entry_errors("hook", entries, config, "Class")


def _find_entry_errors(part: str, entries: list[NamedCode], config: Config, kind: str) -> Iterator[RequestError]:
    """Places that are none, names that come twice, and arguments for nobody."""
    names = [name for name, _ in entries]
    for at, (name, code) in enumerate(entries):
        if ":" in code and (not _PLACE.fullmatch(code) or code.partition(":")[0].endswith(".py")):
            yield RequestError(
                f"--{part} {code}: must be module:{kind}", remedy=f"--{part} my_file:{kind} for {kind} in my_file.py"
            )
        elif not name.isidentifier():
            yield RequestError(f"--{part} {name}={code}: {name!r} is no name", remedy="letters, digits and _")
        elif name in names[:at]:
            yield RequestError(
                f"--{part} {code}: {name!r} is given twice", remedy=f"a name of its own: --{part} NAME={code}"
            )
    for name, args in config.get(f"{part}.args").items():
        if name not in names:
            remedy = did_you_mean(name, names) if names else f"--{part}"
            yield RequestError(f"{part}.args.{name}: there is no --{part} of that name", remedy=remedy)
        elif not isinstance(args, dict) or not all(isinstance(each, str) for each in args):
            yield RequestError(
                f"{part}.args.{name}: must be a mapping of names to values",
                remedy=f"--set '{part}.args.{name}={{NAME: VALUE}}'",
            )
