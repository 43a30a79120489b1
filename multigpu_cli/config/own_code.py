"""Code that settings name: what a file alone names is imported with --own-code only."""

import re
from collections.abc import Collection, Iterator
from typing import Any

from multigpu_cli.config.schema import Config
from multigpu_cli.errors import RequestError

NAMING = ("data", "model", "task")
"""The parts whose name, or whose arguments, may make code be imported."""

_FACTORY = re.compile(r"[^\W\d][\w.]*:[\w.]*")
_OF_GYMNASIUM = re.compile(r".*:.*", re.DOTALL)  # module:Env-v0; it imports whatever stands before the colon
_OF_TRANSFORMERS = re.compile(r".*[:/].*", re.DOTALL)  # org/name, whose code it may fetch


def check_code(
    config: Config, command: Config, where: str, *, environments: Collection[str], parts: Collection[str] = NAMING
) -> None:
    """Refuse code that the user's own command has not named, before anything is imported.

    Args:
        config: the settings that are about to be used, with what a run folder or a checkpoint has brought in.
        command: the user's own: flags, --set, and the file given with --config.
        where: the folder or file that the others come from, for the message.
        environments: the names of the built-in ones, which stand before a colon (gym:CartPole-v1).
        parts: those that will be made from their settings.

    Raises:
        RequestError: says what would have run.
    """
    if command.checkpoint.own_code:
        return
    said = set(_code(command, environments, parts))
    if unasked := [name for name in _code(config, environments, parts) if name not in said]:
        raise RequestError(
            f"{where} names code that this command does not: {', '.join(unasked)}",
            remedy="--own-code, if you know that code and want it to run, or name the same in this command",
        )


def _code(config: Config, environments: Collection[str], parts: Collection[str]) -> Iterator[str]:
    """What these settings would have imported, as a command says it; built-in names are nothing of the kind.

    Nor are those of a library (timm/resnet18): it makes a network of its own by that name, and loads no weights.
    """
    head, _, id = config.data.name.partition(":")
    acts = head in environments
    for part in parts:
        name, pattern = config.get(part) or "", _FACTORY
        if ":" in (id if part == "data" and acts else name):
            yield f"--{part} {name}"
        if part == "data" and acts:
            pattern = _OF_GYMNASIUM
        elif part == "model" and name == "transformers":
            pattern = _OF_TRANSFORMERS
        for place, text in _texts(config.get(f"{part}.args"), f"{part}.args"):
            if pattern.fullmatch(text):
                yield f"{place}={text}"


def _texts(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """Every text in a nested value, and where it stands."""
    if isinstance(value, str):
        yield place, value
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for name, inner in pairs:
        yield from _texts(inner, f"{place}.{name}")
