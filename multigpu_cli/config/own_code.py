"""Code that settings name: if only a run folder names it, it is imported only with --own-code; the plan says so."""

import re
from collections.abc import Collection, Iterator
from typing import Any

from multigpu_cli.config.addresses import hide_passwords
from multigpu_cli.config.schema import SETTINGS, Config
from multigpu_cli.errors import RequestError

NAMING = ("data", "model", "task")
"""The parts of a trained network whose name or arguments may cause an import."""

FOLLOWING = ("optimizer", "schedule", "metric", "hook", "logger")
"""Parts that only a training has, and that may be the user's own code as well."""

_FACTORY = re.compile(r"[^\W\d][\w.]*:[\w.]*")
_OF_GYMNASIUM = re.compile(r".*:.*", re.DOTALL)  # module:Env-v0; gymnasium imports the part before the colon
_OF_TRANSFORMERS = re.compile(r".*[:/].*", re.DOTALL)  # org/name; transformers may download its code


def check_code(
    config: Config, command: Config, where: str, *, environments: Collection[str], parts: Collection[str] = NAMING
) -> None:
    """Refuse code that the user's own command does not name, before anything is imported.

    Args:
        config: the settings that will be used, including those from a run folder or a checkpoint.
        command: the user's own settings: flags, --set, and the file given with --config.
        where: the folder or file that the others come from, for the message.
        environments: names of the built-in environments, which are followed by a colon (gym:CartPole-v1).
        parts: the parts that will be built from these settings.

    Raises:
        RequestError: the message names the code that would have been imported.
    """
    if command.checkpoint.own_code:
        return
    named = set(_code(command, environments, parts))
    if unnamed := [name for name in _code(config, environments, parts) if name not in named]:
        raise RequestError(
            f"{where} names code that this command does not name: {', '.join(unnamed)}",
            remedy="give --own-code if you trust that code, or name it in this command as well",
        )


def describe_origin(config: Config, command: Config, where: str, environments: Collection[str]) -> str:
    """What these settings import, send to or read prompts from that the command does not name; "" if nothing.

    Args:
        where: the file or folder that it comes from; what `config.from_files` has already stays.
    """
    named = set(_list_outside(command, environments))
    found = ", ".join(hide_passwords(text) for text in _list_outside(config, environments) if text not in named)
    return "; ".join(filter(None, [config.from_files, found and f"{where}: {found}"]))


def _list_outside(config: Config, environments: Collection[str]) -> dict[str, None]:
    texts = [*_code(config, environments, (*NAMING, *FOLLOWING)), *(f"--logger {name}" for name in config.log.loggers)]
    places = {"--mirror": config.checkpoint.mirror, "--prompts": config.log.prompts}
    return dict.fromkeys([*texts, *(f"{flag} {place}" for flag, place in places.items() if place)])


def _code(config: Config, environments: Collection[str], parts: Collection[str]) -> Iterator[str]:
    """The code that these settings would import, as flags and --set arguments.

    Built-in names are not included, nor are those of a library (timm/resnet18), which builds its own model by that name
    and loads no weights.
    """
    head, _, id = config.data.name.partition(":")
    acts = head in environments
    if "data" in parts:
        yield from _mixed_code(config)
    for part in parts:
        given, pattern = config.get(part) or "", _FACTORY
        for name in [given] if isinstance(given, str) else given:
            if ":" in (id if part == "data" and acts else name):
                yield f"--{part} {name}"
        if part == "data" and acts:
            pattern = _OF_GYMNASIUM
        elif part == "model" and given == "transformers":
            pattern = _OF_TRANSFORMERS
        arguments = config.get(f"{part}.args") if f"{part}.args" in SETTINGS else {}
        for place, text in _texts(arguments, f"{part}.args"):
            if pattern.fullmatch(text):
                yield f"{place}={text}"


def _mixed_code(config: Config) -> Iterator[str]:
    """The same of the datasets of a mixture."""
    for number, entry in enumerate(config.data.mix):
        if ":" in entry["data"]:
            yield f"data.mix.{number}.data={entry['data']}"
        for place, text in _texts(entry["args"], f"data.mix.{number}.args"):
            if _FACTORY.fullmatch(text):
                yield f"{place}={text}"


def _texts(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """Every text in a nested value, with its key."""
    if isinstance(value, str):
        yield place, value
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for name, inner in pairs:
        yield from _texts(inner, f"{place}.{name}")
