"""The glossary's banned names stay out of the code: no module, class, function, field or parameter has one of them."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.test_house_rules import ROOT, Tree, whole_tree

GLOSSARY = ROOT / "docs/internals/glossary.md"
EXCEPTIONS: dict[tuple[str, str], str] = {}
"""Reason by (path, name): readers of old files, and names that users or PyTorch have chosen."""


def banned_names() -> set[str]:
    """The code words in the first column of the glossary's second table."""
    table = GLOSSARY.read_text(encoding="utf-8").partition("## Banned names")[2]
    cells = re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def defined_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Names of classes, functions, parameters, attributes and module variables, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        if isinstance(node, ast.ClassDef | ast.Module):
            for line in node.body:
                targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
                yield from ((target.id, target.lineno) for target in targets if isinstance(target, ast.Name))


def banned_uses(tree: Tree, banned: set[str]) -> Iterator[tuple[str, str, int]]:
    """Path, name and line of each banned name in the product's code, and of each module that is named so."""
    for path, text in tree.items():
        if path.startswith("tests/"):
            continue
        if (module := path.rpartition("/")[2].removesuffix(".py")) in banned:
            yield path, module, 0
        yield from ((path, name, line) for name, line in defined_names(ast.parse(text)) if name.lstrip("_") in banned)


def test_no_banned_name_is_used() -> None:
    uses = [
        f"{p}:{line}: {name}"
        for p, name, line in banned_uses(whole_tree(), banned_names())
        if (p, name) not in EXCEPTIONS
    ]
    assert uses == []


def test_every_exception_is_needed() -> None:
    uses = {(path, name) for path, name, _ in banned_uses(whole_tree(), banned_names())}
    assert [exception for exception in EXCEPTIONS if exception not in uses] == []


def test_the_glossary_lists_terms_and_banned_names() -> None:
    terms = GLOSSARY.read_text(encoding="utf-8").partition("## Banned names")[0]
    assert 10 <= len(re.findall(r"^\| (?!term|-)", terms, re.MULTILINE)) <= 20
    assert {"Settled", "kept", "because", "lanes"} <= banned_names()


@pytest.mark.parametrize(
    "text",
    [
        "class Settled: pass",
        "def told(): pass",
        "def print_all(because): pass",
        "class Rate:\n    because: str",
        "lanes = 1",
        "print(run.kept)",
        "def _told(): pass",
    ],
)
def test_a_banned_name_is_noticed(text: str) -> None:
    assert len(list(banned_uses({"multigpu_cli/data/home.py": text}, banned_names()))) == 1


@pytest.mark.parametrize("text", ["def f():\n    told = 1", "# because", "reason = 'because'", "import told"])
def test_what_is_no_definition_is_let_pass(text: str) -> None:
    assert list(banned_uses({"multigpu_cli/data/home.py": text}, banned_names())) == []
