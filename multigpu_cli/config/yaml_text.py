"""Reads and writes the YAML of recipes and --set: plain data with lines; no repeated keys, aliases or custom tags."""

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import yaml

from multigpu_cli.config.paths import find_recipe, read_recipe
from multigpu_cli.config.resume_rules import OF_THE_COMMAND, PRIVATE
from multigpu_cli.config.schema import SETTINGS, Config
from multigpu_cli.config.types import PARTS, Setting, SettingEntry
from multigpu_cli.errors import RequestError, TrainingError, make_line

_DEEPEST = 50
_MOST = 20_000  # words, numbers, lists and mappings of a text: those of a second
_PLAIN_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "map", "seq", "merge")}
_FLOAT = re.compile(r"[-+]?(?:\.\d+|\d+(?:\.\d*)?)(?:[eE][-+]?\d+)?$|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$")


class UnreadableError(Exception):
    """The text is not plain YAML: what is wrong, in which line (counted from 1)."""

    def __init__(self, problem: str, line: int) -> None:
        super().__init__(problem, line)
        self.problem, self.line = problem, line


class _Loader(yaml.SafeLoader):
    depth = nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth += 1
        self.nodes += 1
        if self.nodes > _MOST:
            raise UnreadableError(f"more than {_MOST:,} values", self.get_mark().line + 1)
        if self.depth > _DEEPEST:
            raise UnreadableError(f"nested more than {_DEEPEST} levels deep", self.get_mark().line + 1)
        if self.check_event(yaml.AliasEvent):
            mark = self.get_mark()
            raise UnreadableError("anchors and aliases (&x, *x) are not allowed in settings", mark.line + 1)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _resolvers() -> dict[Any, Any]:
    """PyYAML's YAML 1.1, except that 4e-3 is a number (as in YAML 1.2) and 2026-01-31 is text."""
    tables: dict[Any, Any] = {}
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items():
        tables[first] = [pair for pair in pairs if not pair[0].endswith((":timestamp", ":float"))]
    for first in "-+.0123456789":
        tables.setdefault(first, []).append(("tag:yaml.org,2002:float", _FLOAT))
    return tables


_Loader.yaml_implicit_resolvers = _resolvers()
_Dumper.yaml_implicit_resolvers = _resolvers()


def compose(text: str) -> yaml.Node | None:
    """The nodes of one document, checked; None if it is empty.

    UnreadableError: malformed, more than one document, a custom tag, an alias, or a repeated key.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None:
            _check(node)
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise UnreadableError("contains a control character; is it a text file?", line) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise UnreadableError(f"malformed YAML: {error.problem or error.context}", line) from None
    return node


def parse_plain(node: yaml.Node) -> Any:
    """A setting's value: words and numbers as text, so that YAML and flags are parsed by the same code."""
    if isinstance(node, yaml.ScalarNode):
        return None if node.tag.endswith(":null") else str(node.value)
    if isinstance(node, yaml.SequenceNode):
        return [parse_plain(part) for part in node.value]
    assert isinstance(node, yaml.MappingNode)
    return {key.value: parse_typed(value) for key, value in node.value}  # a class may be called no


def parse_typed(node: yaml.Node) -> Any:
    """A value in YAML's own types; UnreadableError: a number that Python can't parse."""
    try:
        return _Loader("").construct_document(node)
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise UnreadableError(f"unreadable value: {str(error)[:80]}", node.start_mark.line + 1) from None


def dump(data: dict[str, Any]) -> str:
    """Plain data as YAML, in the given order; `compose` reads it back."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=None)


def dump_config(config: Config) -> str:
    """The text of config.yaml: every resolved setting except save_dir, resume and own_code; `--config` reads it."""
    return dump(config.nest(key for key in SETTINGS if key not in OF_THE_COMMAND))


def drop_private(content: bytes) -> bytes:
    """Return a config.yaml without its private settings; a long value continues on indented lines."""
    return re.sub(rb"^(%s):.*\n([ \t].*\n|\n)*" % "|".join(PRIVATE).encode(), b"", content, flags=re.MULTILINE)


def dump_value(value: Any) -> str:
    """A single value in one line, as --set takes it."""
    options: dict[str, Any] = {"sort_keys": False, "allow_unicode": True, "width": float("inf")}
    text: str = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, **options)
    return text.removesuffix("...\n").strip()


def _check(node: yaml.Node) -> None:
    line = node.start_mark.line + 1
    if node.tag not in _PLAIN_TAGS:
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        raise UnreadableError(f"the tag {tag} is not allowed: plain values only", line)
    if isinstance(node, yaml.SequenceNode):
        for part in node.value:
            _check(part)
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise UnreadableError("a key must be a word", line)
            if key.value in seen:
                raise UnreadableError(f"{key.value!r} is repeated; it was first given on line {seen[key.value]}", line)
            seen[key.value] = line
            _check(key)
            _check(value)


def from_recipe(
    recipe: str, notes: Collection[str], faults: list[TrainingError]
) -> tuple[dict[str, Any], list[SettingEntry]]:
    """What is noted beside the settings, and these; a config.yaml names its recipe under the key `recipe`."""
    try:
        path = find_recipe(recipe)
        root = compose(read_recipe(path))
        if not isinstance(root, yaml.MappingNode):
            kind = "empty" if root is None else "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
            problem = f"{path}:1: the file is {kind}, not a mapping of settings"
            raise RequestError(problem, remedy="write lines like 'epochs: 20'")
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
    for word, node in root.value:
        key, line = word.value, word.start_mark.line + 1
        if key in PARTS and isinstance(node, yaml.MappingNode):
            for inner, value in node.value:
                full = key if inner.value == PARTS[key] else f"{key}.{inner.value}"
                read = parse_typed if inner.value == "args" else parse_plain
                label = make_line(f"{file}:{inner.start_mark.line + 1}: {key}.{inner.value}")
                entries.append(SettingEntry(full, read(value), label))
        else:
            value = parse_typed(node) if ".args" in key else parse_plain(node)
            if key == "recipe" and not isinstance(value, str | None):
                raise UnreadableError("recipe must be a word", line)
            entries.append(SettingEntry(key, value, make_line(f"{file}:{line}: {key}")))
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
            node = compose(value)
            declared = key in SETTINGS and not key.endswith(".args")
            free = key.partition(".")[0] in PARTS and "." in key and not declared
            read = parse_typed if free else parse_plain
            entries.append(SettingEntry(key, None if node is None else read(node), f"--set {key}"))
        except UnreadableError as error:
            remedy = "quote the value: --set 'KEY=\"VALUE\"'"
            faults.append(RequestError(f"--set {key}: {error.problem}", remedy=remedy))
    return [_free_argument(entry) for entry in entries]


def _free_argument(entry: SettingEntry) -> SettingEntry:
    """--set data.X=v means data.args.X=v, unless X is also the name of a setting."""
    part, _, name = entry.key.partition(".")
    if f"{part}.args" not in SETTINGS or not name or name.split(".")[0] in (PARTS[part], "args"):
        return entry._replace(key=part) if name == PARTS.get(part) else entry
    known = {entry.key, name, f"{part}_{name}"} & SETTINGS.keys()
    return entry if known else entry._replace(key=f"{part}.args.{name}")


def list_arguments(config: Config) -> list[str]:
    """Return flags and --set for each setting that is not the default, without the run folder and private settings."""
    changed = (entry for key, entry in SETTINGS.items() if key not in OF_THE_COMMAND | PRIVATE)
    return [word for entry in changed for word in _list_words(entry, config.get(entry.key))]


def _list_words(entry: Setting, value: Any) -> Iterator[str]:
    if value == entry.default:
        return
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
