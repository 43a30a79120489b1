"""Which code a network is made of: kept with its weights, so that an edit between two attempts is noticed."""

import ast
import inspect
import sys
from collections.abc import Mapping
from hashlib import sha256
from types import FunctionType
from typing import Any

from torch import nn

from multigpu_cli.faults.explain import is_library_file


def describe_code(model: nn.Module) -> dict[str, dict[str, str]]:
    """SHA-256 of the places of each kind of layer, and under Python's version, whose trees are unlike others', of code.

    Code is that of the user's classes of the network, their bases, and what these name in their modules; comments,
    docstrings and format do not count. What has no source (compiled, or typed into a prompt) is left out, as are this
    program's own modules, and what SyncBatchNorm and a lazy layer's first pass change.
    """
    kinds = [type(module) for module in model.modules() if not type(module).__module__.startswith("multigpu_cli.")]
    layers: dict[str, str] = {}
    for place, kind in enumerate(kinds):
        name = "BatchNorm" if "BatchNorm" in kind.__name__ else kind.__name__.removeprefix("Lazy")
        layers[name] = sha256(f"{layers.get(name)} {place}".encode()).hexdigest()
    sources: dict[str, str] = {}
    waiting: list[Any] = list(dict.fromkeys(base for kind in kinds for base in kind.__mro__))
    for part in waiting:  # which grows
        file = getattr(module := sys.modules.get(part.__module__), "__file__", None)
        if not file or is_library_file(file) or part.__module__.startswith("multigpu_cli."):
            continue
        try:
            source = inspect.getsource(part)
            nodes = list(ast.walk(ast.parse(f"if 1:\n{source}" if source[0].isspace() else source)))
        except (OSError, TypeError, SyntaxError):
            continue
        for node in nodes:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
                del node.body[0]
        name, named = part.__qualname__, [vars(module).get(node.id) for node in nodes if isinstance(node, ast.Name)]
        sources[name] = sha256(f"{sources.get(name)} {ast.dump(nodes[0])}".encode()).hexdigest()
        waiting += [each for each in named if isinstance(each, type | FunctionType) and each not in waiting]
    return {"layers": layers, "Python {}.{}".format(*sys.version_info): sources}


def name_changes(before: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]) -> str:
    """The classes, functions and layers that differ, as far as both have them; "" for none."""
    names: set[str] = set()
    for kind, new in now.items():
        old = before.get(kind, new)
        compared = old.keys() | new.keys() if kind == "layers" else old.keys() & new.keys()
        names |= {name for name in compared if old.get(name) != new.get(name)}
    return ", ".join(sorted(names))
