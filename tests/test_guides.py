"""The guides say what is there: their map is the disk, their flags are the schema's, their commands run.

`python -m tests.test_guides` writes the map of the code and the table of flags anew.
"""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import main_multi_gpu
from multigpu_cli.commands.requests import build_config
from multigpu_cli.config.schema import SETTINGS
from tests.test_house_rules import FLOOR, module_of, room_of
from tests.test_readme import NO_COMMANDS, copied, is_reason, run
from tests.walkthrough import Block, blocks

ROOT = Path(__file__).resolve().parents[1]
GUIDE, REFERENCE = ROOT / "MULTI_GPU_GUIDE.md", ROOT / "QUICK_REFERENCE.md"
GUIDES = (GUIDE, REFERENCE)
PAGES = (*GUIDES, ROOT / "README.md")
BEGIN, END = "<!-- python -m tests.test_guides writes this table -->", "<!-- end of the table -->"
OTHER_FILES = {
    "CHANGELOG.md": "What changed for users, newest first.",
    "CONTRIBUTING.md": "Set-up, house rules, and how to add a dataset, model, task or strategy.",
    "LICENSE": "MIT.",
    "MULTI_GPU_GUIDE.md": "This guide.",
    "Makefile": "`make quickstart`, `make test` and the rest; `make` lists them.",
    "QUICK_REFERENCE.md": "One page: one command per task, and all flags.",
    "README.md": "The short start, and what this is for.",
    "SECURITY.md": "What is loaded, what is never executed, and what listens where.",
    "launch_multi_gpu.sh": "Asks how to train, shows the plan and the command, runs it.",
    "pyproject.toml": "What is installed, what it needs, and the settings of ruff, mypy and pytest.",
}
OTHERS_FLAGS = {  # of torchrun, make, tensorboard and the launcher
    *("--nproc_per_node", "--standalone", "--master_port", "--nnodes", "--rdzv-backend", "--rdzv-endpoint", "--nodes"),
    *(
        "--redirects",
        "--tee",
        "--install-completion",
        "--signals-to-handle",
        "--logdir",
        "--yes",
        "--mode",
        "--gpus",
        "--help",
    ),
}
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
PLACE = re.compile(r"(?:multigpu_cli|tests|configs|\.ci)/[\w./-]+|\w+\.(?:py|sh|md|toml)")
FRONT_DOOR = "main_multi_gpu.py"


def prose(guide: Path) -> str:
    """A guide without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", guide.read_text(), flags=re.MULTILINE | re.DOTALL)


def of_both() -> Iterator[tuple[Path, Block]]:
    return ((guide, block) for guide in GUIDES for block in blocks(guide.read_text()))


def runnable() -> list[tuple[Path, Block]]:
    return [(guide, block) for guide, block in of_both() if block.language == "bash" and not block.not_run]


# --- The map of the code ---------------------------------------------------------------------------------------------


def mapped() -> list[tuple[str, str]]:
    """(floor, path) of each row of the guide's map."""
    section = GUIDE.read_text().partition("## Map of the code")[2].partition("\n## ")[0]
    return re.findall(r"^\| (\d+|-) \| `([^`]+)` \| \S.* \|$", section, re.MULTILINE)


def on_disk() -> list[str]:
    top = [file for pattern in ("*.py", "*.sh", "*.md", "*.toml", "Makefile", "LICENSE") for file in ROOT.glob(pattern)]
    code = [file for file in ROOT.glob("multigpu_cli/**/*.py") if file.name != "__init__.py"]
    return sorted(file.relative_to(ROOT).as_posix() for file in [*top, *code])


def map_table() -> str:
    """A row for each file: a module says itself what it does, in the first line of its docstring."""
    rows = []
    for path in on_disk():
        floor, does = "-", OTHER_FILES.get(path, "")
        if path.endswith(".py"):
            floor = str(FLOOR[room_of(module_of(path)) or ""])
            does = (ast.get_docstring(ast.parse((ROOT / path).read_text())) or "").partition("\n")[0]
        rows.append((-int(floor) if floor != "-" else 1, f"| {floor} | `{path}` | {does} |"))
    return "\n".join(["| floor | file | what it does |", "|-|-|-|", *(row for _, row in sorted(rows))])


def test_the_map_is_the_disk() -> None:
    """A new file needs a row: python -m tests.test_guides writes it."""
    assert sorted(path for _, path in mapped()) == on_disk()
    assert sorted(OTHER_FILES) == [path for path in on_disk() if not path.endswith(".py")]


def test_the_map_knows_the_floors() -> None:
    for floor, path in mapped():
        room = room_of(module_of(path)) if path.endswith(".py") else None
        assert floor == ("-" if room is None else str(FLOOR[room])), path


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
        meaning = entry.help if entry else option.help
        default, free = (shown(entry.default), "free" if entry.free else "") if entry else ("", "")
        flag = f"`{option.opts[0]}{' ' + option.metavar if option.metavar else ''}`"
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in (flag, meaning, default, free)) + " |")
    return "\n".join(lines)


def shown(default: object) -> str:
    if isinstance(default, float):
        return f"{default:g}"
    return "" if default in (None, ()) else "off" if default is False else str(default)


def test_the_flag_table_is_the_schema() -> None:
    table = REFERENCE.read_text().partition(BEGIN)[2].partition(END)[0].strip()
    assert table == flag_table(), "python -m tests.test_guides writes it anew"


def test_the_flag_table_has_every_setting() -> None:
    flags = re.findall(r"^\| `(--[\w-]+)", flag_table(), re.MULTILINE)
    assert len(flags) == len(set(flags))
    assert {entry.flag for entry in SETTINGS.values() if entry.flag} <= set(flags)
    assert "| `--batch-size N\\|auto` | samples per device per micro-batch (per GPU) | 32 |  |" in flag_table()
    assert "| `--epochs N` | passes over the training data | 20 | free |" in flag_table()


# --- What the text names ---------------------------------------------------------------------------------------------


def anchor(heading: str) -> str:
    """As GitHub makes it from a heading."""
    return re.sub(r"[^\w -]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("guide", PAGES, ids=lambda guide: guide.name)
def test_links_lead_somewhere(guide: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(guide)):
        if target.startswith("https://"):
            continue
        file, _, place = target.partition("#")
        aim = ROOT / file if file else guide
        assert aim.exists(), target
        if place:
            assert place in map(anchor, re.findall(r"^#+ (.+)$", aim.read_text(), re.MULTILINE)), target


@pytest.mark.parametrize("guide", PAGES, ids=lambda guide: guide.name)
def test_files_and_flags_that_are_named_exist(guide: Path) -> None:
    group = typer.main.get_group(main_multi_gpu.app)
    ours = {flag for each in (group, *group.commands.values()) for option in each.params for flag in option.opts}
    assert [line for line in prose(guide).splitlines() if line.count("`") % 2] == []  # code that spans lines hides
    for code in CODE.findall(prose(guide)):
        if PLACE.fullmatch(code):
            assert (ROOT / code).exists() or code.startswith("my_"), code
        if not re.match(r"python (?!main_multi_gpu)", code):
            assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", code)) <= ours | OTHERS_FLAGS, code


def test_what_is_not_there_yet_is_said() -> None:
    section = GUIDE.read_text().partition("## Not yet")[2].partition("\n## ")[0]
    promised = re.search(r"^- commands: ([\w, ]+)\.", section, re.MULTILINE)
    there = set(typer.main.get_group(main_multi_gpu.app).commands)
    assert not set(promised[1].split(", ") if promised else ()) & there


# --- The commands ----------------------------------------------------------------------------------------------------


def commands() -> list[str]:
    """Every call of the front door in a bash block, run or not, and in the text."""
    typed = [block.text for page in PAGES for block in blocks(page.read_text()) if block.language == "bash"]
    found = [line for text in typed for line in logical_lines(text)]
    found += [code for page in PAGES for code in CODE.findall(prose(page))]
    return [line for line in dict.fromkeys(found) if re.search(rf"(python|torchrun)\b.* {FRONT_DOOR}", line)]


def logical_lines(script: str) -> list[str]:
    joined = re.sub(r"\\\n\s*", "", script)
    return [re.split(r" [|>] | &&", line)[0] for line in joined.splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("line", commands())
def test_a_command_passes_the_door(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that need data or GPUs: flags, values and rules are checked before either is touched."""
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line, comments=True)
    at = next(place for place, word in enumerate(words) if word.endswith(FRONT_DOOR))
    for flag in ("--data-dir", "--resume"):
        if flag in words:
            (tmp_path / words[words.index(flag) + 1]).mkdir(parents=True)
    for flag in ("--config", "--init-from"):
        file = tmp_path / words[words.index(flag) + 1] if flag in words else tmp_path
        if file.suffix:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("epochs: 2\n")
    group = typer.main.get_group(main_multi_gpu.app)
    name, *rest = [*words[at + 1 :], ""]
    command = group.commands.get(name)
    context = (command or group).make_context("multigpu", rest[:-1] if command else words[at + 1 :])
    environment = {}
    if "torchrun" in words[:at]:
        count = next(re.sub(r".*=", "", word) for word in words[:at] if "nproc" in word)
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        environment = ranks | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    if "data" in context.params:
        build_config(context.params, environment)


def test_every_block_is_run_or_says_why_not() -> None:
    assert [block for _, block in of_both() if block.not_run and not is_reason(block.not_run)] == []
    assert [block for _, block in of_both() if block.language not in NO_COMMANDS | {"bash"}] == []
    assert len(runnable()) >= 5


def sections() -> dict[tuple[str, str], list[tuple[Path, Block]]]:
    """The blocks that run, by guide and chapter: those of one chapter may build on each other, others not."""
    found: dict[tuple[str, str], list[tuple[Path, Block]]] = {}
    for guide, block in runnable():
        before = guide.read_text().splitlines()[: block.line]
        chapter = next((line[3:] for line in reversed(before) if line.startswith("## ")), "")
        found.setdefault((guide.stem, chapter), []).append((guide, block))
    return found


@pytest.mark.parametrize("section", sections(), ids="-".join)
def test_the_blocks_of_a_chapter_run(section: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And say what the guide shows: each line of the text block that follows one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    project = copied(tmp_path)
    for guide, block in sections()[section]:
        code, output = run(block.text, project)
        assert code == 0, f"{guide.name}:{block.line}\n{block.text}\n{output[-6000:]}"
        said = {" ".join(line.split()) for line in output.splitlines()}
        assert [line for line in expected(guide, block) if line not in said] == [], output[-6000:]


def expected(guide: Path, block: Block) -> list[str]:
    """The lines of the text block that directly follows a bash block."""
    after = guide.read_text().split("\n", block.line - 1)[-1].partition(block.text)[2].removeprefix("```").lstrip()
    shown_next = re.match(r"```text\n(.*?)^```", after, re.MULTILINE | re.DOTALL)
    return [" ".join(line.split()) for line in shown_next[1].splitlines() if line.strip()] if shown_next else []


def test_shown_output_is_found() -> None:
    shown_blocks = [block for guide, block in runnable() if expected(guide, block)]
    assert len(shown_blocks) >= 2


def test_the_reference_is_one_page() -> None:
    assert len(REFERENCE.read_text().splitlines()) <= 130


if __name__ == "__main__":
    for guide, table in ((GUIDE, map_table()), (REFERENCE, flag_table())):
        before, _, rest = guide.read_text().partition(BEGIN)
        guide.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}")
