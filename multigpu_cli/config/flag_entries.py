"""What the user wrote, entry by entry."""

from collections.abc import Mapping
from typing import Any, NamedTuple

PARTS = ("data", "model", "task", "optimizer", "schedule")


class SettingEntry(NamedTuple):
    """One setting as somebody wrote it.

    Attributes:
        key: its name, perhaps of no setting.
        value: text, or a list or mapping from YAML.
        label: how messages name it: "--lr", "--set lr", "configs/har.yaml:3: lr".
    """

    key: str
    value: Any
    label: str


def from_flags(flags: Mapping[str, Any]) -> list[SettingEntry]:
    """Flags by key; a caller of the Python API may also hand in data.args and its like."""
    labels = {key: key if "." in key else "--" + key.replace("_", "-") for key in flags}
    return [SettingEntry(key, value, labels[key]) for key, value in flags.items() if value is not None]
