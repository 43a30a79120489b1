"""`Setting`: one setting with its flag, and how a dataclass declares it as a field."""

from dataclasses import field
from typing import Any, NamedTuple

from multigpu_cli.config import types
from multigpu_cli.config.types import ValueType


class Setting(NamedTuple):
    """One setting.

    Attributes:
        key: its name in YAML and --set.
        section, attribute: where Config stores the value.
        kind: the type of its values.
        default: the value if it is not given.
        help: one line, without the default.
        panel: the group of flags in --help.
        free: it may differ on resume.
    """

    key: str
    section: str
    attribute: str
    kind: ValueType
    default: Any
    help: str
    panel: str
    free: bool

    @property
    def flag(self) -> str | None:
        return None if "." in self.key else "--" + self.key.replace("_", "-")


def setting(key: str, default: Any, kind: ValueType, help: str, *, free: bool = False) -> Any:
    """Declare a dataclass field with its flag."""
    return field(default=default, metadata={"key": key, "kind": kind, "help": help, "free": free})


def mapping(key: str, kind: ValueType, help: str, *, free: bool = False) -> Any:
    """Declare a field that holds a mapping, which has no flag."""
    return field(default_factory=dict, metadata={"key": key, "kind": kind, "help": help, "free": free})


def arguments(key: str) -> Any:
    """Declare the free-form arguments of a part."""
    return mapping(key, types.args, "arguments")
