"""`SettingEntry`: one setting as the user wrote it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

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
