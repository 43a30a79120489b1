"""Writes the generated parts of the documents anew: `python -m tests.support.generate_docs`.

A generated part stands between two comments in its file. tests/test_guides.py compares each with what is made here.
"""

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import typer

import main_multi_gpu
from benchmarks.gpu_workloads import Job, jobs
from benchmarks.suite import OLD, last_recorded
from multigpu_cli.capabilities import DATASETS, ENVIRONMENTS, MODELS, TASKS
from multigpu_cli.commands.help import COMMON, TOPICS
from multigpu_cli.config.schema import SETTINGS
from tests.gpu.registry import CHECKS
from tests.support.golden_masks import tabulate_templates
from tests.test_house_rules import FLOOR, module_of, room_of

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "python -m tests.support.generate_docs"
EXTENSIONS = (
    "multigpu_cli.tasks.base:Task",
    "multigpu_cli.tasks.base:BatchMetrics",
    "multigpu_cli.tasks.own_loss:GlobalBatchTask",
    "multigpu_cli.data.loader:Batch",
    "multigpu_cli.hooks.hooks:HookNumbers",
    "multigpu_cli.environments.base:EnvironmentGroup",
    "multigpu_cli.environments.base:StepReturn",
    "multigpu_cli.environments.base:Discrete",
    "multigpu_cli.environments.base:Box",
)
"""What code of a user's own subclasses, receives or returns."""

ARGUMENTS_OF = {
    "csv": ("multigpu_cli.data.tables.csv:CsvFormat",),
    **dict.fromkeys(("arrow", "tar", "jsonl"), ("multigpu_cli.data.rows.source:RowOptions",)),
    "trading": ("multigpu_cli.trading.market:build", "multigpu_cli.trading.environment:TradingRules"),
    "ppo": ("multigpu_cli.rl.objective:PPOSettings",),
}
"""Where else the arguments of a built-in dataset, environment or task are declared and explained."""

OFFERED = {"data_dir", "mode", "seed", "model_dir", "max_length", "packing", "compiled", "mix", "form", "moved"}
"""What the program gives a factory by itself, from settings of their own."""


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
    """Every option of the front door, chapter by chapter, as the help has them."""
    lines, panel = ["| flag | what it means | default | resume |", "|-|-|-|-|"], ""
    for option in _train_options():
        if option.rich_help_panel != panel:
            panel = option.rich_help_panel
            lines.append(f"| **{panel}** | | | |")
        entry = SETTINGS.get(option.name)
        default, free = (_format_default(entry.default), "free" if entry.free else "") if entry else ("", "")
        lines.append(_row(_flag(option), _meaning(option), default, free))
    return "\n".join(lines)


def common_flags() -> str:
    """Those that most commands have."""
    options = {option.name: option for option in _train_options()}
    rows = []
    for name in COMMON:
        entry = SETTINGS.get(name)
        rows.append(
            _row(_flag(options[name]), _meaning(options[name]), _format_default(entry.default) if entry else "")
        )
    return "\n".join(["| flag | what it means | default |", "|-|-|-|", *rows])


def setting_table() -> str:
    """The settings that have no flag: for YAML and --set."""
    rows = [
        _row(f"`{entry.key}`", entry.help, _format_default(entry.default), "free" if entry.free else "")
        for entry in SETTINGS.values()
        if not entry.flag
    ]
    return "\n".join(["| key | what it means | default | resume |", "|-|-|-|-|", *rows])


def command_list() -> str:
    """Every command with its help and its own options, those of a training left out."""
    group: Any = typer.main.get_command(main_multi_gpu.app)
    shared = {option.name for option in _train_options()}
    parts = []
    for name, command in sorted(group.commands.items()):
        below = [(f"{name} {sub}", each) for sub, each in getattr(command, "commands", {}).items()]
        for path, each in [*([(name, command)] if command.callback or not below else []), *below]:
            own = [option for option in each.params if option.name not in {*shared, "help", "help_all"}]
            also = "Also takes the training flags." if len(own) < len(each.params) - len(shared) / 2 else ""
            usage = " ".join(option.name.upper() for option in own if option.param_type_name == "argument")
            help_text = " ".join((each.help or "").split())
            parts.append(f"### {path}\n\n`multigpu {path} {usage}`".rstrip(" `") + "`")
            parts.append(f"{help_text} {also}".strip())
            rows = [_row(_flag(option), option.help or "") for option in own if option.param_type_name == "option"]
            parts += ["\n".join(["| option | what it means |", "|-|-|", *rows])] if rows else []
    return "\n\n".join(parts)


def _train_options() -> list[Any]:
    command = typer.main.get_command(main_multi_gpu.app)
    chapters = [title for title, _ in TOPICS.values()]
    options = [option for option in command.params if getattr(option, "rich_help_panel", None)]
    return sorted(options, key=lambda option: chapters.index(option.rich_help_panel))


def _flag(option: Any) -> str:
    return f"`{option.opts[0]}{' ' + option.metavar if option.metavar else ''}`"


def _meaning(option: Any) -> str:
    entry = SETTINGS.get(option.name)
    return entry.help if entry else str(getattr(option, "help", ""))


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _format_default(default: object) -> str:
    if isinstance(default, float):
        return f"{default:g}"
    return "" if default in (None, ()) else "off" if default is False else str(default)


# --- Arguments of what is built in -----------------------------------------------------------------------------------


def argument_tables() -> str:
    """The arguments of each built-in dataset, environment, model and task: names, defaults, and what they mean."""
    parts = []
    for prefix, registry in (("data", DATASETS), ("data", ENVIRONMENTS), ("model", MODELS), ("task", TASKS)):
        for name, place in registry.items():
            if place.startswith("multigpu_cli."):
                parts += _describe_arguments(prefix, name, [place, *ARGUMENTS_OF.get(name, ())])
    return "\n\n".join(parts)


def _describe_arguments(prefix: str, name: str, places: list[str]) -> list[str]:
    nodes = [(_find(place), (ROOT / _file_of(place)).read_text().splitlines()) for place in places]
    rows: dict[str, list[str]] = {}
    for node, lines in nodes:
        explained = _explain_arguments(node)
        for argument, default, line in _list_arguments(node):
            comment = lines[line - 1].partition("  # ")[2]
            meaning = explained.get(argument) or comment
            if argument in rows and meaning:
                rows[argument][1] = meaning.removesuffix(".")
            elif argument not in rows:
                rows[argument] = [default, meaning.removesuffix(".")]
    shown = [_row(f"`{prefix}.{key}`", *row) for key, row in rows.items() if key not in OFFERED]
    summary = " ".join((ast.get_docstring(nodes[0][0]) or "").split("\n\n")[0].split())
    table = "\n".join(["| argument | default | meaning |", "|-|-|-|", *shown])
    return [f"### {prefix} {name}", summary, table] if shown else []


def _file_of(place: str) -> str:
    return place.partition(":")[0].replace(".", "/") + ".py"


def _find(place: str) -> ast.ClassDef | ast.FunctionDef:
    tree = ast.parse((ROOT / _file_of(place)).read_text())
    found = next(node for node in tree.body if getattr(node, "name", "") == place.partition(":")[2])
    assert isinstance(found, ast.ClassDef | ast.FunctionDef)
    return found


def _list_arguments(node: ast.ClassDef | ast.FunctionDef) -> Iterator[tuple[str, str, int]]:
    """Name, default and line of each argument that has a default, or of each such field."""
    if isinstance(node, ast.ClassDef):
        made = next((each for each in node.body if getattr(each, "name", "") == "__init__"), None)
        if not isinstance(made, ast.FunctionDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and field.value:
                    yield ast.unparse(field.target), _show(field.value), field.lineno
            return
        node = made
    given = node.args
    for argument, default in zip(given.args[len(given.args) - len(given.defaults) :], given.defaults, strict=True):
        yield argument.arg, _show(default), argument.lineno
    for argument, value in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        if value:
            yield argument.arg, _show(value), argument.lineno


def _show(default: ast.expr) -> str:
    try:
        value = ast.literal_eval(default)
        return str(value).lower() if isinstance(value, bool) else _format_default(value)
    except ValueError:
        return ast.unparse(default)


def _explain_arguments(node: ast.ClassDef | ast.FunctionDef) -> dict[str, str]:
    """What the docstring says of each argument by name; not where it only refers to another one."""
    found = re.search(r"^(?:Args|Attributes):\n((?:    .*\n?)+)", ast.get_docstring(node) or "", re.MULTILINE)
    entries = re.split(r"\n(?! )", textwrap.dedent(found[1]).strip()) if found else []
    explained: dict[str, str] = {}
    for names, _, text in (" ".join(entry.split()).partition(": ") for entry in entries):
        if not text.startswith("see "):
            explained |= dict.fromkeys(names.split(", "), text)
    return explained


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
    source = textwrap.dedent(inspect.getsource(thing))
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.ClassDef | ast.FunctionDef), thing
    parts = [f"### {name}", *([place] if place else []), _code(_signature(node)), format_docstring(node)]
    if isinstance(node, ast.ClassDef):
        fields = "\n".join(f"- `{field}`: {meaning}" for field, meaning in _explain_fields(node, source.splitlines()))
        parts += ["*Attributes*", fields] if fields else []
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and not method.name.startswith("_") and ast.get_docstring(method):
                parts += [f"#### {name}.{method.name}", _code(_signature(method)), format_docstring(method)]
    return "\n\n".join(part for part in parts if part)


def _explain_fields(node: ast.ClassDef, lines: list[str]) -> Iterator[tuple[str, str]]:
    """What the comment beside a field, or the text below it, says of it."""
    for field, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            below = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            if meaning := lines[field.lineno - 1].partition("  # ")[2] or str(below):
                yield field.target.id, meaning.removesuffix(".") + "."


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

GPU_FIGURES = "benchmarks/results/gpu-bench.jsonl"
"""Rows of make gpu-bench."""


def benchmark_table() -> str:
    """The last recorded figure of each name in benchmarks/results, beside that of the old state."""
    files = sorted((json.loads(file.read_text()) for file in ROOT.glob("benchmarks/results/*.json")), key=_time)
    rows = {row["name"]: (row, result["time"]) for result in files for row in result["rows"]}
    old = last_recorded(OLD.parent)
    lines = ["| what | median (least to greatest) | aim | before | date |", "|-|-|-|-|-|"]
    return "\n".join([*lines, *(_figure_row(row, time, old.get(row["name"])) for row, time in rows.values())])


def gpu_table() -> str:
    """Of each job of make gpu-bench, our figures and the limit's: medians of the turns of the newest code."""
    recorded = [json.loads(line) for line in (ROOT / GPU_FIGURES).read_text().splitlines()]
    head = "| what | ours / limit | aim | samples/s | peak memory, GiB | launches of a step | CPU time of a step, ms |"
    lines = [head, "|-|-|-|-|-|-|-|"]
    for name, job in jobs().items():
        rows = [row for row in recorded if row["job"] == name and "value" in row]
        rows = [row for row in rows if row["code"] == rows[-1]["code"]]
        if rows and job.build:
            lines.append(_gpu_row(job, [[row for row in rows if row["side"] == side] for side in job.sides]))
    return "\n".join(lines)


def _gpu_row(job: Job, sides: list[list[dict[str, Any]]]) -> str:
    def of_both(field: str, scale: float = 1.0) -> list[float | None]:
        return [scale * median(row[field] for row in side) if side else None for side in sides]

    fields = {"value": 1.0, "peak_memory_bytes": 2.0**-30, "launches": 1.0, "host_seconds": 1e3}
    pairs = [of_both(field, scale) for field, scale in fields.items()]
    ours, limit = pairs[0]
    share = ours / limit if ours and limit else None
    missed = ", missed" if share is not None and share < job.aim else ""
    texts = [" / ".join("–" if each is None else _round(each) for each in pair) for pair in pairs]
    return _row(job.name, "–" if share is None else _round(share), f"≥ {job.aim}{missed}", *texts)


def _time(result: dict[str, Any]) -> float:
    return float(result["time"])


def _figure_row(row: dict[str, Any], time: float, old: float | None) -> str:
    unit = "" if row["unit"] == "ratio" else f" {row['unit']}"
    least, value, most = (_round(row[key]) for key in ("least", "value", "most"))
    aim = ""
    if row["aim"] is not None:
        met = row["value"] >= row["aim"] if row["at_least"] else row["value"] <= row["aim"]
        aim = f"{'≥' if row['at_least'] else '≤'} {_round(row['aim'])}{'' if met else ', missed'}"
    date = datetime.fromtimestamp(time, UTC).date().isoformat()
    before = "" if old is None else _round(old) + unit
    return f"| {row['name']} | {value}{unit} ({least} to {most}) | {aim} | {before} | {date} |"


def _round(value: float) -> str:
    """To three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}" if abs(value) >= 1e-3 else f"{value:.1g}"


# --- What was tested where -------------------------------------------------------------------------------------------

GPU_RESULTS = "benchmarks/results/gpu-check.jsonl"
"""What make gpu-check has found, where it was kept."""


class Feature(NamedTuple):
    """A row: on CPUs and on simulated GPUs a test file, or words; on real GPUs the checks that must have passed."""

    name: str
    cpu: str
    simulated: str
    one: tuple[str, ...] = ()
    several: tuple[str, ...] = ()


FEATURES = (
    Feature(
        "one device, DDP",
        "tests/distributed/test_gradients.py",
        "tests/gpu/simulated/test_steady_step.py",
        ("host-syncs", "bf16", "ddp-nccl"),
        ("exact-2", "scaling"),
    ),
    Feature("DataParallel (`dp`)", "trains on one device", "tests/gpu/test_several.py", ("dp-twice",)),
    Feature(
        "FSDP",
        "tests/distributed/test_sharded.py",
        "tests/gpu/simulated/test_gathered_format.py",
        ("fsdp-one-rank",),
        ("fsdp-2", "hsdp-8"),
    ),
    Feature(
        "`--exact`",
        "tests/distributed/test_exact.py",
        "tests/gpu/simulated/test_exact.py",
        ("exact-one-gpu", "fsdp-one-rank-exact"),
        ("exact-2", "exact-4", "exact-8"),
    ),
    Feature(
        "bf16, fp16", "tests/runtime/test_precision.py", "tests/gpu/simulated/test_steady_step.py", ("bf16", "fp16")
    ),
    Feature(
        "`--compile`, fp32",
        "tests/runtime/test_compile.py",
        "–",
        ("compile", "reduce-overhead", "reduce-overhead-accumulation"),
    ),
    Feature("`--compile`, bf16", "–", "–", ("compile-steady", "compile-loss", "exact-compiled")),
    Feature(
        "checkpoint, resume, faults",
        "tests/checkpoint/test_store.py",
        "tests/gpu/simulated/test_checkpoint.py",
        ("checkpoint-bytes", "resume-killed", "resume-sigterm", "device-assert"),
        ("rank-killed",),
    ),
    Feature("out of memory", "–", "tests/gpu/test_out_of_memory.py", ("out-of-memory", "out-of-memory-later")),
    Feature(
        "`--batch-size auto`",
        "tests/run/test_fit_batch_sizes_to_memory.py",
        "tests/gpu/test_batch_size.py",
        ("batch-size-auto",),
    ),
    Feature("several machines, SLURM", "on one machine, in network namespaces", "–"),
    Feature("Kubernetes, Docker", "definitions only", "–"),
    Feature("`doctor`", "tests/commands/doctor/test_doctor.py", "tests/commands/doctor/test_gpus.py", ("doctor",)),
    Feature("4-bit base models", "–", "–"),
)


def status_table() -> str:
    """Every feature; what no recorded check has shown on a real GPU is "not yet" there. Then the checks to pass yet."""
    newest = _read_checks()
    passed = _name_devices(newest)
    rows = [
        _row(
            each.name,
            _tested(each.cpu),
            _tested(each.simulated),
            *(_on_gpus(c, passed) for c in (each.one, each.several)),
        )
        for each in FEATURES
    ]
    table = "\n".join(["| feature | CPU, gloo | simulated GPUs | one real GPU | several GPUs |", "|-|-|-|-|-|", *rows])
    left = [name for name, check in CHECKS.items() if check.needs == 1 and name not in passed]
    said = "; ".join(f"`{name}` ({_describe_result(newest.get(name))})" for name in left)
    return f"{table}\n\nChecks for one GPU that have not passed: {said or 'none'}."


def _describe_result(line: Mapping[str, Any] | None) -> str:
    return f"{line['verdict']}: {line['said']}" if line else "not run"


def tested_table() -> str:
    """The same in a line, for the README: how many of the checks for one GPU have passed, and for several."""
    passed = _name_devices(_read_checks())
    one = _count_passed([name for name, check in CHECKS.items() if check.needs == 1], passed)
    several = _count_passed([name for name, check in CHECKS.items() if check.needs > 1], passed)
    head = (
        "| [what was tested where](docs/status.md) | CPU processes (gloo) | GPUs simulated in memory "
        "| one real GPU | several real GPUs |"
    )
    return "\n".join([head, "|-|-|-|-|-|", _row("training, resume, `--exact`", "yes", "yes", one, several)])


def _count_passed(checks: Sequence[str], passed: Mapping[str, str]) -> str:
    good = [name for name in checks if name in passed]
    devices = ", ".join(sorted({passed[name] for name in good}))
    return f"{len(good)} of {len(checks)} checks passed, {devices}" if good else "not yet"


def _tested(where: str) -> str:
    if where.startswith("tests/"):
        assert (ROOT / where).exists(), f"{where} is gone"
        return "tested"
    return where


def _on_gpus(checks: tuple[str, ...], passed: Mapping[str, str]) -> str:
    missing = [name for name in checks if name not in passed]
    return "not yet" if missing or not checks else f"tested, {passed[checks[0]]}"


def _read_checks() -> dict[str, dict[str, Any]]:
    """Of each check the newest line from a real GPU."""
    file = ROOT / GPU_RESULTS
    lines = map(json.loads, file.read_text().splitlines() if file.exists() else ())
    return {line["check"]: line for line in lines if not line["machine"]["simulated"]}


def _name_devices(newest: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The checks that passed → the GPU."""
    return {name: line["machine"]["device"] for name, line in newest.items() if line["verdict"] == "passed"}


# --- Writing ---------------------------------------------------------------------------------------------------------

PARTS: dict[str, tuple[str, Callable[[], str]]] = {
    "code map": ("docs/internals/code-map.md", code_map),
    "api": ("docs/reference/api.md", api_reference),
    "flags": ("docs/reference/cli.md", flag_table),
    "commands": ("docs/reference/cli.md", command_list),
    "common flags": ("QUICK_REFERENCE.md", common_flags),
    "settings": ("docs/reference/config.md", setting_table),
    "arguments": ("docs/reference/arguments.md", argument_tables),
    "chat templates": ("docs/howto/language-models.md", tabulate_templates),
    "benchmarks": ("docs/measurements.md", benchmark_table),
    "gpu": ("docs/measurements.md", gpu_table),
    "status": ("docs/status.md", status_table),
    "tested": ("README.md", tested_table),
    "tour": ("MULTI_GPU_GUIDE.md", tested_table),
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
