"""Reads the settings of a recipe and of --set, both of which are YAML."""

from collections.abc import Collection, Sequence
from typing import Any

import yaml

from multigpu_cli.config import recipes, yaml_text
from multigpu_cli.config.command_line import PARTS, SettingEntry
from multigpu_cli.config.schema import SETTINGS
from multigpu_cli.config.yaml_text import UnreadableError
from multigpu_cli.errors import RequestError, TrainingError


def from_recipe(
    recipe: str, notes: Collection[str], faults: list[TrainingError]
) -> tuple[dict[str, Any], list[SettingEntry]]:
    """What is noted beside the settings, and these; a config.yaml names its recipe under the key `recipe`."""
    try:
        path = recipes.find_recipe(recipe)
        root = yaml_text.compose(recipes.read_recipe(path))
        if not isinstance(root, yaml.MappingNode):
            kind = "empty" if root is None else "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
            raise RequestError(
                f"{path}:1: the file is {kind}, not a mapping of settings", remedy="write lines like 'epochs: 20'"
            )
        entries = _flat(root, str(path))
    except UnreadableError as error:
        faults.append(RequestError(f"{path}:{error.line}: {error.problem}"))
        return {}, []
    except RequestError as error:
        faults.append(error)
        return {}, []
    noted = {entry.key: entry.value for entry in entries if entry.key in notes}
    title = path.stem if path.stem != "config" else None
    return {"recipe": title} | noted, [entry for entry in entries if entry.key not in notes]


def _flat(root: yaml.MappingNode, file: str) -> list[SettingEntry]:
    """All settings of a file under their full keys; the value of one of PARTS may be a word or {name, args}."""
    entries = []
    for key, node, number in yaml_text.list_lines(root):
        if key in PARTS and isinstance(node, yaml.MappingNode):
            for inner, value, line in yaml_text.list_lines(node):
                full = key if inner == PARTS[key] else f"{key}.{inner}"
                read = yaml_text.parse_typed if inner == "args" else yaml_text.parse_plain
                entries.append(SettingEntry(full, read(value), f"{file}:{line}: {key}.{inner}"))
        else:
            value = yaml_text.parse_typed(node) if ".args" in key else yaml_text.parse_plain(node)
            if key == "recipe" and not isinstance(value, str | None):
                raise UnreadableError("recipe must be a word", number)
            entries.append(SettingEntry(key, value, f"{file}:{number}: {key}"))
    return entries


def from_sets(sets: Sequence[str], faults: list[TrainingError]) -> list[SettingEntry]:
    entries = []
    for text in sets:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key:
            faults.append(RequestError(f"--set {text}: must be KEY=VALUE", remedy="for instance --set epochs=5"))
            continue
        try:
            node = yaml_text.compose(value)
            declared = key in SETTINGS and not key.endswith(".args")
            free = key.partition(".")[0] in PARTS and "." in key and not declared
            read = yaml_text.parse_typed if free else yaml_text.parse_plain
            entries.append(SettingEntry(key, None if node is None else read(node), f"--set {key}"))
        except UnreadableError as error:
            faults.append(
                RequestError(f"--set {key}: {error.problem}", remedy="quote the value: --set 'KEY=\"VALUE\"'")
            )
    return [_free_argument(entry) for entry in entries]


def _free_argument(entry: SettingEntry) -> SettingEntry:
    """--set data.X=v means data.args.X=v, unless X is also the name of a setting."""
    part, _, name = entry.key.partition(".")
    if f"{part}.args" not in SETTINGS or not name or name.split(".")[0] in (PARTS[part], "args"):
        return entry._replace(key=part) if name == PARTS.get(part) else entry
    known = {entry.key, name, f"{part}_{name}"} & SETTINGS.keys()
    return entry if known else entry._replace(key=f"{part}.args.{name}")
