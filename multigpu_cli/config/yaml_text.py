"""Reads and writes the YAML of recipes: plain data with line numbers; no repeated keys, aliases or custom tags."""

import re
from typing import Any, NamedTuple

import yaml

_DEEPEST = 50
_PLAIN_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "map", "seq", "merge")}
_FLOAT = re.compile(r"[-+]?(?:\.\d+|\d+(?:\.\d*)?)(?:[eE][-+]?\d+)?$|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$")


class UnreadableError(Exception):
    """The text is not plain YAML.

    Args:
        problem: what is wrong.
        line: counted from 1.
    """

    def __init__(self, problem: str, line: int) -> None:
        super().__init__(problem, line)
        self.problem, self.line = problem, line


class Line(NamedTuple):
    """One `key: value` of a mapping."""

    key: str
    value: yaml.Node
    number: int


class _Loader(yaml.SafeLoader):
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth += 1
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

    Raises:
        UnreadableError: malformed, more than one document, a custom tag, an alias, or a repeated key.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None:
            _check(node)
    except yaml.reader.ReaderError as error:
        raise UnreadableError(
            "contains a control character; is it a text file?", text[: error.position].count("\n") + 1
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise UnreadableError(
            f"malformed YAML: {error.problem or error.context}", mark.line + 1 if mark else 1
        ) from None
    return node


def list_lines(mapping: yaml.MappingNode) -> list[Line]:
    """The entries of a checked mapping in order, with keys as they are written."""
    return [Line(key.value, value, key.start_mark.line + 1) for key, value in mapping.value]


def parse_plain(node: yaml.Node) -> Any:
    """A setting's value: words and numbers as text, so that YAML and flags are parsed by the same code.

    Also the keys of a mapping are text, for a class may be called no, and a parameter off.
    """
    if isinstance(node, yaml.ScalarNode):
        return None if node.tag.endswith(":null") else str(node.value)
    if isinstance(node, yaml.SequenceNode):
        return [parse_plain(part) for part in node.value]
    assert isinstance(node, yaml.MappingNode)
    return {line.key: parse_typed(line.value) for line in list_lines(node)}


def parse_typed(node: yaml.Node) -> Any:
    """A value in YAML's own types: numbers, booleans, text, None, lists, mappings.

    Raises:
        UnreadableError: a number that Python can't parse.
    """
    try:
        return _Loader("").construct_document(node)
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise UnreadableError(f"unreadable value: {str(error)[:80]}", node.start_mark.line + 1) from None


def dump(data: dict[str, Any]) -> str:
    """Plain data as YAML, in the given order; `compose` reads it back."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=None)


def dump_value(value: Any) -> str:
    """A single value in one line, as --set takes it."""
    options: dict[str, Any] = {"sort_keys": False, "allow_unicode": True, "width": float("inf")}
    text: str = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, **options)
    return text.removesuffix("...\n").strip()


def _check(node: yaml.Node) -> None:
    line = node.start_mark.line + 1
    if node.tag not in _PLAIN_TAGS:
        raise UnreadableError(
            f"the tag {node.tag.replace('tag:yaml.org,2002:', '!!')} is not allowed: plain values only", line
        )
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
