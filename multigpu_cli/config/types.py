"""Settings and the types of their values: one parser for flags, YAML and --set, with the same messages."""

import math
import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, NamedTuple

from multigpu_cli.capabilities import MULTI_PROCESS
from multigpu_cli.errors import RequestError, did_you_mean
from multigpu_cli.planning.schedule import OPTIMIZERS, REFUSED, SHAPES

OWN_CODE = re.compile(r"[^\W\d]\w*(\.(?!py:)[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
"""'module:name', as settings name the user's own code; no file.py:name."""

_LONGEST_NAME, _LONGEST_PATH = 255, 4095  # bytes: Linux's limits
_EXPONENT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+")

ClassWeights = str | tuple[float, ...] | dict[str, float]
"""'balanced', one weight for each class, or some by the name of the class."""


ParameterGroup = dict[str, Any]
"""A pattern of names (match), and the weight_decay and lr_factor of the parameters that it matches."""


class ValueType(NamedTuple):
    """A type of value: its placeholder in --help, and the parser of its text or YAML."""

    metavar: str
    parse: Callable[[Any], Any]  # ValueError: the message says what is expected

    def read(self, value: Any, label: str, remedy: str = "") -> Any:
        """The parsed value; a RequestError that begins with the label if it is not of this type."""
        try:
            return self.parse(value)
        except ValueError as error:
            raise RequestError(f"{label} {error}", remedy=remedy) from error


def integer(low: int, high: int = 2**63 - 1, *, word: str | None = None) -> ValueType:
    """A whole number in [low, high], or the given word (auto)."""
    expected = f"a whole number of at least {low}" if high == 2**63 - 1 else f"a whole number from {low} to {high}"
    expected += f", or {word}" if word else ""

    def parse(value: Any) -> int | str:
        if word and value == word:
            return word
        if isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d{1,30}\s*", value):
            value = int(value)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"must be {expected}, not {quote_value(value)}")
        return value

    return ValueType(f"N|{word}" if word else "N", parse)


def number(
    low: float, high: float = math.inf, *, above: bool = False, below: bool = False, word: str | None = None
) -> ValueType:
    """A finite number in [low, high], where `above` and `below` exclude the ends; or the given word (off)."""
    limits = ("above" if above else "of at least") + f" {low:g}"
    limits += "" if high == math.inf else (" and below" if below else " and at most") + f" {high:g}"
    expected = f"a number {limits}" + (f", or {word}" if word else "")

    def parse(value: Any) -> float | str:
        if word and (value == word or (word == "off" and value is False)):
            return word
        try:
            parsed = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            parsed = math.nan
        inside = low <= parsed <= high and not (above and parsed == low) and not (below and parsed == high)
        if not math.isfinite(parsed) or not inside:
            raise ValueError(f"must be {expected}, not {quote_value(value)}")
        return parsed

    return ValueType(f"X|{word}" if word else "X", parse)


def choice(*options: str) -> ValueType:
    """One of a few words; YAML reads on/off/yes/no as booleans, which count as on and off."""

    def parse(value: Any) -> str:
        word = {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value
        if word not in options:
            hint = did_you_mean(str(word), options)
            close = f"; {hint}" if hint.startswith("did") else ""  # else it lists the options once more
            raise ValueError(f"must be {' or '.join(options)}, not {quote_value(value)}{close}")
        return str(word)

    return ValueType("|".join(options), parse)


def choice_or_code(*options: str, own: str, refused: Mapping[str, str] | None = None) -> ValueType:
    """A name out of a few, or the user's own code (`own` is "module:Class", say); refused names have a reason."""
    reasons = refused or {}

    def parse(value: Any) -> str:
        word = str(value)
        if word in options or (":" in word and OWN_CODE.fullmatch(word)):
            return word
        if word in reasons:
            raise ValueError(f"{word} is not supported: {reasons[word]}")
        if ":" in word:
            raise ValueError(f"must be {own}, such as my_file:NAME for NAME in my_file.py, not {quote_value(value)}")
        close = did_you_mean(word, options)
        raise ValueError(f"must be {', '.join(options)} or {own}, not {quote_value(value)}; {close}")

    return ValueType("|".join([*options, own]), parse)


def _text(value: Any) -> str:
    if isinstance(value, (bool, list, dict)) or not str(value).strip() or "\0" in str(value):
        raise ValueError(f"must be a word, not {quote_value(value)}")
    return str(value)


def _command(value: Any) -> str:
    if not shlex.split(text := _text(value)):  # ValueError: a quotation without an end
        raise ValueError(f"must be a program with its arguments, not {quote_value(value)}")
    return text


def _switch(value: Any) -> bool:
    words = {"true": True, "false": False, "on": True, "off": False, "yes": True, "no": False}
    parsed = words.get(str(value).lower())
    if parsed is None:
        raise ValueError(f"must be true or false, not {quote_value(value)}")
    return parsed


def parse_path(value: str) -> Path:
    """A path as the user wrote it, with ~ expanded; ValueError: too long for any file system, or an unknown user's."""
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in value.split("/")) or len(value) > _LONGEST_PATH:
        raise ValueError(f"must be a path, and {quote_value(value)} is too long for any file system")
    try:
        return Path(value).expanduser()
    except RuntimeError as error:
        raise ValueError(f"must be a path, and {quote_value(value)} names the home of an unknown user") from error


def _ids(value: Any) -> tuple[int, ...]:
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, (list, tuple)) else [value]
    if not parts or not all(re.fullmatch(r"\s*\d+\s*", str(part)) for part in parts):
        raise ValueError(f"must be GPU numbers like 0,1, not {quote_value(value)}")
    ids = tuple(int(part) for part in parts)
    if len(set(ids)) < len(ids):
        raise ValueError(f"names a GPU twice: {quote_value(value)}")
    return ids


def _every(value: Any) -> str:
    """Optimizer steps (500) or minutes (10m), as the text that the user wrote."""
    if isinstance(value, bool) or not re.fullmatch(r"[1-9]\d{0,8}m?", str(value).strip()):
        raise ValueError(f"must be optimizer steps (500) or minutes (10m), not {quote_value(value)}")
    return str(value).strip()


def _patterns(value: Any) -> tuple[str, ...]:
    return tuple(_text(part) for part in (value if _is_list(value) else [value]))


def _modules(value: Any) -> tuple[str, ...]:
    return tuple(_text(name.strip()) for each in _patterns(value) for name in each.split(","))


def _named_code(value: Any) -> tuple[str, ...]:
    entries = _patterns(value)
    if wrong := [entry for entry in entries if not (entry.partition("=")[2] if "=" in entry else entry).strip()]:
        raise ValueError(f"must be a name, or NAME=module:function, not {quote_value(wrong[0])}")
    return entries


def _best(value: Any) -> str:
    if not re.fullmatch(r"[^\W\d]\w*:(max|min)", str(value)):
        raise ValueError(f"must be NAME:max or NAME:min, such as val_loss:min, not {quote_value(value)}")
    return str(value)


def _loggers(value: Any) -> tuple[str, ...]:
    """Names of loggers; none, or nothing, is no logger. An address is not quoted: it may hold a password."""
    names = tuple(str(part).strip() for part in (value if _is_list(value) else [value]))
    if any("/" in name or "@" in name for name in names):
        remedy = "set the address in the environment (MLFLOW_TRACKING_URI, WANDB_BASE_URL)"
        raise ValueError(f"must be a name, not an address: {remedy}")
    if names in ((), ("none",)):
        return ()
    if "none" in names or len(set(names)) < len(names):
        raise ValueError(f"must be different loggers, or none, not {quote_value(', '.join(names))}")
    return tuple(_text(name) for name in names)


def _args(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"must be a mapping of names to values, not {quote_value(value)}")
    # YAML 1.1 reads 4e-3 as text
    return {
        name: float(entry) if isinstance(entry, str) and _EXPONENT.fullmatch(entry) else entry
        for name, entry in value.items()
    }


def _rates(value: Any) -> dict[str, float]:
    factor = number(0, above=True).parse
    if not isinstance(value, dict) or not all(isinstance(pattern, str) and pattern for pattern in value):
        raise ValueError(f"must be a mapping of patterns to factors, like {{head.*: 10}}, not {quote_value(value)}")
    return {pattern: float(factor(entry)) for pattern, entry in value.items()}


def _groups(value: Any) -> tuple[ParameterGroup, ...]:
    """Groups as they stand in YAML; a single one may stand without its list."""
    return tuple(_parse_group(each) for each in (value if _is_list(value) else [value]))


def _parse_group(value: Any) -> ParameterGroup:
    known = ("match", "weight_decay", "lr_factor")
    if not isinstance(value, dict) or not isinstance(value.get("match"), str) or not value["match"]:
        example = '[{match: "*.bias", weight_decay: 0, lr_factor: 0.1}]'
        raise ValueError(f"must be a list of groups, like {example}, not {quote_value(value)}")
    if unknown := sorted(str(key) for key in value if key not in known):
        raise ValueError(f"has no {unknown[0]!r} in a group; {did_you_mean(unknown[0], known)}")
    if len(value) == 1:
        raise ValueError(f"sets neither weight_decay nor lr_factor for {value['match']!r}")
    group: ParameterGroup = {"match": value["match"]}
    for name, kind in (("weight_decay", number(0)), ("lr_factor", number(0, above=True))):
        if name in value:
            try:
                group[name] = float(kind.parse(value[name]))
            except ValueError as error:
                raise ValueError(f"{name} of {value['match']!r} {error}") from error
    return group


def _class_weights(value: Any) -> ClassWeights:
    if value == "balanced":
        return "balanced"
    given = list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if _is_list(value) else []
    try:
        weights = {str(name): float(number) for name, number in given if not isinstance(number, bool)}
    except (TypeError, ValueError):
        weights = {}
    if not weights or len(weights) < len(given) or not all(0 <= each < math.inf for each in weights.values()):
        raise ValueError(f"must be balanced, one weight for each class, or {{class: weight}}, not {quote_value(value)}")
    return weights if isinstance(value, dict) else tuple(weights.values())


_SOURCE = {"data", "data_dir", "args", "weight"}


def _sources(value: Any) -> tuple[dict[str, Any], ...]:
    """The datasets of a mixture, each as a mapping with all of its entries."""
    entries = [value] if isinstance(value, dict) else value
    if not _is_list(entries) or len(entries) == 1 or not all(isinstance(each, dict) for each in entries):
        example = "{data: csv, data_dir: a}"
        raise ValueError(f"must be a list of at least two datasets, like {example}, not {quote_value(value)}")
    return tuple(_parse_source(entry) for entry in entries)


def _parse_source(entry: dict[str, Any]) -> dict[str, Any]:
    if unknown := [str(name) for name in entry if name not in _SOURCE]:
        raise ValueError(f"has an entry {unknown[0]!r}; {did_you_mean(unknown[0], _SOURCE)}")
    if "data" not in entry:
        raise ValueError(f"has a dataset without a name: {quote_value(entry)}")
    folder = entry.get("data_dir")
    return {
        "data": _text(entry["data"]),
        "data_dir": None if folder is None else path.parse(folder),
        "args": _args(entry.get("args") or {}),
        "weight": number(0, above=True).parse(entry.get("weight", 1)),
    }


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def quote_value(value: Any) -> str:
    """A value as messages quote it, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


text = ValueType("NAME", _text)
path = ValueType("PATH", lambda value: str(parse_path(_text(value))))
url = ValueType("URL", _text)
command = ValueType("CMD", _command)
switch = ValueType("", _switch)
gpu_ids = ValueType("0,1", _ids)
every = ValueType("500|10m", _every)
patterns = ValueType("PATTERN", _patterns)
modules = ValueType("NAME,NAME", _modules)
named_code = ValueType("NAME", _named_code)
best = ValueType("NAME:max|NAME:min", _best)
loggers = ValueType("NAME", _loggers)
args = ValueType("", _args)
rates = ValueType("{PATTERN: X}", _rates)
sources = ValueType("[{data: NAME, …}, …]", _sources)
multi_gpu = choice("auto", *MULTI_PROCESS, "dp", "none")
optimizer = choice_or_code(*OPTIMIZERS, own="module:Class", refused=REFUSED)
schedule = choice_or_code(*SHAPES, own="module:function")
groups = ValueType("[{match: PATTERN, …}]", _groups)
class_weights = ValueType("balanced|W,W", _class_weights)


WITHOUT_FLAG = {"guard"}
"""Settings without a dot in their key that are given in YAML or by --set alone."""


class Setting(NamedTuple):
    """One setting: `section` and `attribute` are its place in Config, and a `free` one may differ on resume."""

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
        return None if "." in self.key or self.key in WITHOUT_FLAG else "--" + self.key.replace("_", "-")


def setting(key: str, default: Any, kind: ValueType, help: str, *, free: bool = False, panel: str = "") -> Any:
    """Declare a dataclass field; a setting whose key has a dot has no flag. Without `panel` it is its section's.

    The key may contain {section}, the field of Config, and {name}, that of the setting in its section.
    """
    metadata = {"key": key, "kind": kind, "help": help, "free": free, "panel": panel}
    if default == {}:
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def flag(default: Any, kind: ValueType, help: str, *, free: bool = False, panel: str = "") -> Any:
    """Declare a dataclass field whose own name is the key of the setting."""
    return setting("{name}", default, kind, help, free=free, panel=panel)


def subkey(default: Any, kind: ValueType, help: str) -> Any:
    """Declare a dataclass field whose key is SECTION.NAME, such as data.mixup for `mixup` of the section `data`."""
    return setting("{section}.{name}", default, kind, help)


def arguments(key: str) -> Any:
    """Declare the free-form arguments of a part."""
    return setting(key, {}, args, f"arguments, as {key}.NAME=VALUE")


class SettingEntry(NamedTuple):
    """One setting as the user wrote it, under a key that may be unknown; labels are --lr, or configs/har.yaml:3: lr."""

    key: str
    value: Any
    label: str


PARTS = {"adapter": "kind"} | dict.fromkeys(  # sections of a YAML file → word for what the flag of that name gives
    ("data", "model", "task", "optimizer", "schedule", "metric", "hook", "strategy", "logger"), "name"
)
