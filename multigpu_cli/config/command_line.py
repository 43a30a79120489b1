"""Settings as the user wrote them (`SettingEntry`), and a Config as the words of a command."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from multigpu_cli.config.resume_rules import OF_THE_COMMAND
from multigpu_cli.config.schema import SETTINGS, Config
from multigpu_cli.config.setting import Setting

PARTS = {
    "data": "name",
    "model": "name",
    "adapter": "kind",
    "task": "name",
    "optimizer": "name",
    "schedule": "name",
    "metric": "name",
    "hook": "name",
    "strategy": "name",
    "logger": "name",
}
"""Sections of a YAML file, with the word for what the flag of that name gives."""


class SettingEntry(NamedTuple):
    """One setting as the user wrote it.

    Attributes:
        key: its name, which may be unknown.
        value: text, or a list or mapping from YAML.
        label: its name in messages: "--lr", "--set lr", "configs/har.yaml:3: lr".
    """

    key: str
    value: Any
    label: str


def from_flags(flags: Mapping[str, Any]) -> list[SettingEntry]:
    """Flags by key; the Python API also passes data.args, model.args and so on."""
    labels = {key: key if "." in key else "--" + key.replace("_", "-") for key in flags}
    return [SettingEntry(key, value, labels[key]) for key, value in flags.items() if value is not None]


def list_arguments(config: Config) -> list[str]:
    """Flags and --set for each setting that is not the default, but for the run folder."""
    changed = (entry for key, entry in SETTINGS.items() if key not in OF_THE_COMMAND)
    return [word for entry in changed for word in _list_words(entry, config.get(entry.key))]


def _list_words(entry: Setting, value: Any) -> Iterator[str]:
    if value == entry.default:
        return
    from multigpu_cli.config.yaml_text import dump_value  # late: few commands need it

    if entry.key.endswith(".args"):
        for name, each in value.items():
            yield from ("--set", f"{entry.key}.{name}={dump_value(each)}")
    elif entry.flag is None:
        yield from ("--set", f"{entry.key}={dump_value(list(value) if isinstance(value, tuple) else value)}")
    elif value is True:
        yield entry.flag
    elif entry.default == ():
        for each in value:
            yield from (entry.flag, str(each))
    else:
        yield from (entry.flag, ",".join(map(str, value)) if isinstance(value, tuple) else str(value))
