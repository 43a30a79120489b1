"""Code as settings name it: NAME, module:Class, or NAME=module:Class; and what a command may import, match and show."""

import re
from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatch
from typing import Any, NamedTuple

from multigpu_cli.capabilities import ENVIRONMENTS, OUTSIDE
from multigpu_cli.config.resume_rules import PRIVATE
from multigpu_cli.config.schema import SETTINGS, Config
from multigpu_cli.config.types import OWN_CODE
from multigpu_cli.errors import RequestError, did_you_mean, make_line


class NamedCode(NamedTuple):
    """Code, by a registry's name or module:attribute, with the name under which its results and state are kept."""

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


def find_entry_errors(part: str, entries: list[NamedCode], config: Config, kind: str) -> Iterator[RequestError]:
    """Places that are none, names that come twice, and arguments for nobody."""
    names = [name for name, _ in entries]
    for at, (name, code) in enumerate(entries):
        if ":" in code and not OWN_CODE.fullmatch(code):
            problem = f"--{part} {code}: must be module:{kind}"
            yield RequestError(problem, remedy=f"--{part} my_file:{kind} for {kind} in my_file.py")
        elif not name.isidentifier():
            yield RequestError(f"--{part} {name}={code}: {name!r} is not a valid name", remedy="letters, digits and _")
        elif name in names[:at]:
            problem = f"--{part} {code}: {name!r} is given twice"
            yield RequestError(problem, remedy=f"give it a name: --{part} NAME={code}")
    for name, args in config.get(f"{part}.args").items():
        if name not in names:
            remedy = did_you_mean(name, names) if names else f"--{part}"
            yield RequestError(f"{part}.args.{name}: there is no --{part} of that name", remedy=remedy)
        elif not isinstance(args, dict) or not all(isinstance(each, str) for each in args):
            problem = f"{part}.args.{name}: must be a mapping of names to values"
            yield RequestError(problem, remedy=f"--set '{part}.args.{name}={{NAME: VALUE}}'")


NAMING = ("data", "model", "task")  # parts of a trained network whose name or arguments may cause an import
FOLLOWING = ("optimizer", "schedule", "metric", "hook", "logger")
"""Parts that only a training has, and that may be the user's own code as well."""

_FACTORY = re.compile(r"[^\W\d][\w.]*:[\w.]*")
_OF_GYMNASIUM = re.compile(r".*:.*", re.DOTALL)  # module:Env-v0; gymnasium imports the part before the colon
_OF_TRANSFORMERS = re.compile(r".*[:/].*", re.DOTALL)  # org/name; transformers may download its code


def names_environments(config: Config) -> bool:
    """Whether --data names built-in environments (gym:CartPole-v1), in spite of its colon."""
    return config.data.name.partition(":")[0] in ENVIRONMENTS


def check_code(config: Config, command: Config, where: str, parts: Collection[str] = NAMING) -> None:
    """Refuse code that the user's own command does not name, before anything is imported.

    `config` has the settings that will be used, also those of a run folder or checkpoint; `command` the user's own:
    flags, --set, and the file given with --config. RequestError: names the code that would have been imported.
    """
    if command.checkpoint.own_code:
        return
    named = set(_code(command, parts))
    if unnamed := [name for name in _code(config, parts) if name not in named]:
        listed = make_line(", ".join(unnamed))
        problem = f"{where} names code that this command does not name: {listed}"
        raise RequestError(problem, remedy="add --own-code if you trust this code, or name it in this command as well")


_OF_NEW_RUN = {"data", "data_dir", "data.mix", "model", "task"}  # a command with one of these is meant to start a run


def check_new_run(command: Config, folder: str) -> None:
    """Raise RequestError if a command with --own-code would train the defaults in a folder without a checkpoint.

    The flag is for the code of a run that is resumed, so the folder is mistyped, or its checkpoints are lost.
    """
    is_meant = command.explicit & _OF_NEW_RUN or any(_code(command, (*NAMING, *FOLLOWING)))
    if command.checkpoint.own_code and not is_meant:
        problem = f"--own-code: {folder} has no checkpoint to resume, and this command names neither data nor model"
        raise RequestError(problem, remedy="--save-dir with the folder of a run; or --data and --model for a new one")


def describe_origin(config: Config, command: Config, where: str) -> str:
    """What these settings, from `where`, import, send to or read prompts from that the command does not name; or ""."""
    named = _list_outside(command)
    found = ", ".join(hide_passwords(text) for text in _list_outside(config) if text not in named)
    return "; ".join(filter(None, [config.from_files, found and f"{where}: {found}"]))


def _list_outside(config: Config) -> dict[str, None]:
    given = {key: "…" if key in PRIVATE and config.get(key) else config.get(key) or () for key in OUTSIDE}
    places = [f"--{key} {each}" for key, all in given.items() for each in ([all] if isinstance(all, str) else all)]
    return dict.fromkeys([*_code(config, (*NAMING, *FOLLOWING)), *places])


def _code(config: Config, parts: Collection[str]) -> Iterator[str]:
    """The code that these settings would import, as flags and --set arguments.

    Built-in names are not included, nor are those of a library (timm/resnet18), which builds a model without weights.
    """
    id, acts = config.data.name.partition(":")[2], names_environments(config)
    for number, entry in enumerate(config.data.mix if "data" in parts else ()):
        if ":" in entry["data"]:
            yield f"data.mix.{number}.data={entry['data']}"
        for place, text in _texts(entry["args"], f"data.mix.{number}.args"):
            if _FACTORY.fullmatch(text):
                yield f"{place}={text}"
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


def _texts(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """Every text in a nested value, with its key."""
    if isinstance(value, str):
        yield place, value
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for name, inner in pairs:
        yield from _texts(inner, f"{place}.{name}")


def match_names(names: Sequence[str], pattern: str, origin: str, kind: str = "parameter") -> list[str]:
    """Return the names that match a shell pattern; RequestError, which begins with `origin`, if no name matches."""
    chosen = [name for name in names if fnmatch(name, pattern)]
    if not chosen:
        near = get_close_matches(pattern.rstrip("*"), names, n=4, cutoff=0.5) or list(names[:4])
        raise RequestError(f"{origin} matches no {kind}", remedy=f"names are like {', '.join(near)}")
    return chosen


_WITH_PASSWORD = re.compile(r"(?<=://)[^/\s@]*:[^/\s@]+(?=@)")
_USER = re.compile(r"(?<=://)[^/\s@]+(?=@)")


def has_password(value: Any) -> bool:
    """Whether a setting's value, or a text in it, is an address with a password, as in https://me:secret@host."""
    return any(_WITH_PASSWORD.search(text) for _, text in _texts(value, ""))


def hide_passwords(text: str, secrets: tuple[str, ...] = ()) -> str:
    """A text without the users and passwords of its addresses, and without these secrets."""
    for secret in secrets:
        text = text.replace(secret, "…")
    return _USER.sub("…", text)
