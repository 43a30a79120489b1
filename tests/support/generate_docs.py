"""Writes the generated parts of the documents anew: `python -m tests.support.generate_docs`.

A generated part stands between two comments in its file. tests/test_guides.py compares each with what is made here.
"""

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

import main_multi_gpu
from multigpu_cli.config.schema import SETTINGS
from tests.test_house_rules import FLOOR, module_of, room_of

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "python -m tests.support.generate_docs"
EXTENSIONS = (
    "multigpu_cli.tasks.base:Task",
    "multigpu_cli.tasks.base:BatchMetrics",
    "multigpu_cli.data.loader:Batch",
    "multigpu_cli.hooks.hooks:HookNumbers",
    "multigpu_cli.environments.base:EnvironmentGroup",
    "multigpu_cli.environments.base:StepReturn",
    "multigpu_cli.environments.base:Discrete",
    "multigpu_cli.environments.base:Box",
)
"""What code of a user's own subclasses, receives or returns."""

README_ROWS = {
    "digits": "",
    "UCI HAR, all channels": "",
    "nanoGPT's Shakespeare": "",
    "defaults / hand-written, both fused and clipped": "an MLP's step of 1 ms / by hand with the same optimizer",
    "stock: ours / hand-written": "the same / by hand with torch's defaults",
    "stock: Lightning / hand-written": "Lightning's step / by hand with torch's defaults",
    "first step: ours / hand-written": "process start to first step / a script by hand",
    "a checkpoint of 100 MB": "",
    "cost of `--exact`": "",
}
"""Rows of docs/measurements.md that the README repeats, by the beginning of their first cell, and its own words."""


# --- The code map ----------------------------------------------------------------------------------------------------


def code_files() -> list[str]:
    code = [file for file in ROOT.glob("multigpu_cli/**/*.py") if file.name != "__init__.py"]
    return sorted(file.relative_to(ROOT).as_posix() for file in [*ROOT.glob("*.py"), *code])


def code_map() -> str:
    """A row for each file: a module says itself what it does, in the first line of its docstring."""
    rows = []
    for path in code_files():
        purpose = (ast.get_docstring(ast.parse((ROOT / path).read_text())) or "").partition("\n")[0]
        floor = FLOOR[room_of(module_of(path)) or ""]
        rows.append((-floor, f"| {floor} | `{path}` | {purpose} |"))
    return "\n".join(["| floor | file | purpose |", "|-|-|-|", *(row for _, row in sorted(rows))])


# --- The table of flags ----------------------------------------------------------------------------------------------


def flag_table() -> str:
    """Every option of the front door, panel by panel, as the help has them."""
    command = typer.main.get_command(main_multi_gpu.app)
    lines, panel = ["| flag | what it means | default | resume |", "|-|-|-|-|"], ""
    for option in command.params:
        group = getattr(option, "rich_help_panel", None)
        if group is None:
            continue
        if group != panel:
            lines.append(f"| **{group}** | | | |")
            panel = group
        entry = SETTINGS.get(option.name)
        meaning = entry.help if entry else str(getattr(option, "help", ""))
        default, free = (_format_default(entry.default), "free" if entry.free else "") if entry else ("", "")
        flag = f"`{option.opts[0]}{' ' + option.metavar if option.metavar else ''}`"
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in (flag, meaning, default, free)) + " |")
    return "\n".join(lines)


def _format_default(default: object) -> str:
    if isinstance(default, float):
        return f"{default:g}"
    return "" if default in (None, ()) else "off" if default is False else str(default)


# --- The API reference -----------------------------------------------------------------------------------------------


def api_reference() -> str:
    """The public names of `train_multi_gpu`, then what code of a user's own builds on."""
    module = import_module("train_multi_gpu")
    names = ["train", *sorted(name for name in vars(import_module("multigpu_cli.api.public")) if name[0] != "_")]
    parts = ["## train_multi_gpu", *(describe(name, getattr(module, name)) for name in names), "## Extension points"]
    for place in EXTENSIONS:
        path, _, name = place.partition(":")
        parts.append(describe(name, getattr(import_module(path), name), f"`from {path} import {name}`"))
    return "\n\n".join(parts)


def describe(name: str, thing: Any, place: str = "") -> str:
    """Heading, signature and docstring of a function or class; of a class also its public methods."""
    if not inspect.isroutine(thing) and not inspect.isclass(thing):
        kind = type(thing).__name__
        return f"### {name}\n\nA {kind}: the functions here that wrap a model or keep metrics are its methods."
    node = _parse(thing)
    parts = [f"### {name}", *([place] if place else []), _code(_signature(node)), format_docstring(node)]
    if isinstance(node, ast.ClassDef):
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and not method.name.startswith("_") and ast.get_docstring(method):
                parts += [f"#### {name}.{method.name}", _code(_signature(method)), format_docstring(method)]
    return "\n\n".join(part for part in parts if part)


def _parse(thing: Any) -> ast.ClassDef | ast.FunctionDef:
    node = ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]
    assert isinstance(node, ast.ClassDef | ast.FunctionDef), thing
    return node


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


def _signature(node: ast.ClassDef | ast.FunctionDef) -> str:
    """As the source has it, without its body; of a class, its fields or the arguments of its `__init__`."""
    if isinstance(node, ast.FunctionDef):
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return _wrap(f"def {node.name}(", _arguments(node), f"){returns}")
    made = next((item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"), None)
    if made:
        return _wrap(f"{node.name}(", _arguments(made), ")")
    head = f"class {node.name}({', '.join(ast.unparse(base) for base in node.bases)})".removesuffix("()")
    return "\n    ".join([head, *(ast.unparse(item) for item in node.body if isinstance(item, ast.AnnAssign))])


def _arguments(function: ast.FunctionDef) -> list[str]:
    """Each argument with its annotation and default, `self` left out."""
    given, marks = function.args, []
    defaults = [None] * (len(given.args) - len(given.defaults)) + given.defaults
    marks += [_argument(each, default) for each, default in zip(given.args, defaults, strict=True)]
    marks += [f"*{_argument(given.vararg, None)}"] if given.vararg else ["*"] if given.kwonlyargs else []
    marks += [_argument(each, default) for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    marks += [f"**{_argument(given.kwarg, None)}"] if given.kwarg else []
    return [mark for mark in marks if mark not in ("self", "cls")]


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    text = argument.arg + (f": {ast.unparse(argument.annotation)}" if argument.annotation else "")
    return text if default is None else f"{text} = {ast.unparse(default)}"


def _wrap(head: str, arguments: list[str], tail: str) -> str:
    line = f"{head}{', '.join(arguments)}{tail}"
    return line if len(line) <= 110 else "\n".join([head, *(f"    {each}," for each in arguments), tail])


def format_docstring(node: ast.ClassDef | ast.FunctionDef) -> str:
    """Markdown from a docstring: paragraphs on one line each, `Args:` and its like as lists, examples as code."""
    done: list[str] = []
    for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
        title, _, rest = paragraph.partition(":\n")
        if title in ("Args", "Attributes", "Returns", "Raises", "Yields"):
            entries = re.split(r"\n(?! )", textwrap.dedent(rest))
            done.append(f"*{title}*")
            done.append("\n".join(f"- {_format_entry(' '.join(entry.split()))}" for entry in entries))
        elif paragraph.startswith(("    ", "from ")):
            done.append(_code(textwrap.dedent(paragraph)))
        else:
            done.append(" ".join(paragraph.split()))
    return "\n\n".join(done)


def _format_entry(entry: str) -> str:
    """With the names before the colon as code."""
    return re.sub(r"^(\w+(?:, \w+)*):", lambda names: f"`{names[1]}`:", entry)


# --- Measured figures ------------------------------------------------------------------------------------------------


def benchmark_table() -> str:
    """The last recorded figure of each name in benchmarks/results."""
    files = sorted((json.loads(file.read_text()) for file in ROOT.glob("benchmarks/results/*.json")), key=_time)
    rows = {row["name"]: (row, result["time"]) for result in files for row in result["rows"]}
    lines = ["| what | median (least to greatest) | aim | date |", "|-|-|-|-|"]
    return "\n".join([*lines, *(_figure_row(row, time) for row, time in rows.values())])


def _time(result: dict[str, Any]) -> float:
    return float(result["time"])


def _figure_row(row: dict[str, Any], time: float) -> str:
    unit = "" if row["unit"] == "ratio" else f" {row['unit']}"
    least, value, most = (_round(row[key]) for key in ("least", "value", "most"))
    aim = ""
    if row["aim"] is not None:
        met = row["value"] >= row["aim"] if row["at_least"] else row["value"] <= row["aim"]
        aim = f"{'≥' if row['at_least'] else '≤'} {_round(row['aim'])}{'' if met else ', missed'}"
    date = datetime.fromtimestamp(time, UTC).date().isoformat()
    return f"| {row['name']} | {value}{unit} ({least} to {most}) | {aim} | {date} |"


def _round(value: float) -> str:
    """To three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}" if abs(value) >= 1e-3 else f"{value:.1g}"


def readme_figures() -> str:
    """The rows that the README repeats, as they stand in docs/measurements.md."""
    rows = [line for line in (ROOT / "docs/measurements.md").read_text().splitlines() if line.startswith("| ")]
    return "\n".join(["| measured on two CPU cores | figure |", "|-|-|", *_choose_rows(rows)])


def _choose_rows(rows: list[str]) -> Iterator[str]:
    for start, label in README_ROWS.items():
        (row,) = (row for row in rows if row.startswith(f"| {start}"))
        what, figure, *_ = row.removeprefix("| ").split(" | ")
        yield f"| {label or what} | {figure} |"


# --- Writing ---------------------------------------------------------------------------------------------------------

PARTS: dict[str, tuple[str, Callable[[], str]]] = {
    "code map": ("docs/internals/code-map.md", code_map),
    "api": ("docs/api.md", api_reference),
    "flags": ("QUICK_REFERENCE.md", flag_table),
    "benchmarks": ("docs/measurements.md", benchmark_table),
    "figures": ("README.md", readme_figures),  # after the measurements, whose rows it repeats
}
"""Name of a generated part → the file it stands in, and what makes it."""


def split_at(name: str) -> tuple[str, str, str]:
    """The file of a part: what stands before it, the part itself, and what follows."""
    before, begin, rest = (ROOT / PARTS[name][0]).read_text().partition(f"<!-- generated: {name}, by {COMMAND} -->\n")
    part, end, after = rest.partition(f"\n<!-- end of {name} -->")
    assert end, f"{PARTS[name][0]} has no place for {name!r}"
    return before + begin, part, end + after


def main() -> None:
    for name, (file, make) in PARTS.items():
        before, _, after = split_at(name)
        (ROOT / file).write_text(before + make() + after)


if __name__ == "__main__":
    main()
