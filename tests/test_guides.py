"""The documents say what is there: their generated parts are up to date, flags, files and links exist, commands run."""

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import main_multi_gpu
from multigpu_cli.commands.requests import build_config
from multigpu_cli.config.schema import SETTINGS
from tests.support import generate_docs
from tests.support.generate_docs import COMMAND, PARTS, flag_table
from tests.support.walkthrough import Block, blocks
from tests.test_readme import NO_COMMANDS, copy_project, is_reason, run

ROOT = Path(__file__).resolve().parents[1]
GUIDE, REFERENCE, README = ROOT / "MULTI_GPU_GUIDE.md", ROOT / "QUICK_REFERENCE.md", ROOT / "README.md"
INDEX, MEASUREMENTS = ROOT / "docs" / "README.md", ROOT / "docs" / "measurements.md"
LESSON = sorted(ROOT.glob("docs/lesson/*.md"))
HAVE = ROOT / "docs" / "start" / "what-you-have.md"  # tests/test_what_you_have.py runs its rows, refused ones too
USAGE = ROOT / "docs" / "reference" / "cli.md"  # generated: `multigpu export CHECKPOINT` lacks what is required
GUIDES = (GUIDE, REFERENCE, *sorted(ROOT.glob("docs/**/*.md")))
PAGES = (*GUIDES, README)
OTHERS_FLAGS = {  # of torchrun, make, tensorboard, the launcher, SLURM, pip and docker
    *("--partition", "--account", "--index-url", "--shm-size", "--mem", "--gres"),
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


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def of_all() -> Iterator[tuple[Path, Block]]:
    return ((guide, block) for guide in GUIDES for block in blocks(guide.read_text()))


def runnable() -> list[tuple[Path, Block]]:
    return [(guide, block) for guide, block in of_all() if block.language == "bash" and not block.not_run]


# --- Generated parts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PARTS)
def test_generated_parts_are_up_to_date(name: str) -> None:
    _, part, _ = generate_docs.split_at(name)
    assert part == PARTS[name][1](), f"{COMMAND} writes it anew"


def test_the_flag_table_has_every_setting() -> None:
    flags = re.findall(r"^\| `(--[\w-]+)", flag_table(), re.MULTILINE)
    assert len(flags) == len(set(flags))
    assert {entry.flag for entry in SETTINGS.values() if entry.flag} <= set(flags)
    assert "| `--batch-size N\\|auto` | samples per GPU in one micro-batch | 32 |  |" in flag_table()
    assert "| `--epochs N` | number of epochs | 20 | free |" in flag_table()


def test_the_code_map_has_every_module_with_its_floor_and_purpose() -> None:
    rows = re.findall(r"^\| (\d+) \| `([^`]+)` \| \S.* \|$", generate_docs.code_map(), re.MULTILINE)
    modules = [file for file in (ROOT / "multigpu_cli").rglob("*.py") if file.name != "__init__.py"]
    assert len(rows) == len(modules) + len(list(ROOT.glob("*.py")))
    assert {("0", "multigpu_cli/errors.py"), ("22", "main_multi_gpu.py")} < set(rows)


def documented(first: int, second: str = "a b", *rest: int, third: bool = False) -> str:
    """Sum up.

    Over two
    lines:

    Args:
        first: a number,
            of samples.
        rest, third: the others.

    Raises:
        ValueError: never.
    """
    return f"{first}{second}{rest}{third}"


def test_a_docstring_becomes_markdown() -> None:
    text = generate_docs.describe("documented", documented)
    assert text.splitlines() == [
        *("### documented", "", "```python"),
        "def documented(first: int, second: str = 'a b', *rest: int, third: bool = False) -> str",
        *("```", "", "Sum up.", "", "Over two lines:", "", "*Args*", "", "- `first`: a number, of samples."),
        *("- `rest, third`: the others.", "", "*Raises*", "", "- `ValueError`: never."),
    ]


# --- Measured figures ------------------------------------------------------------------------------------------------


def figures(text: str) -> set[str]:
    """Numbers as only a measurement yields them: two decimals or more, a unit or a range beside them or not."""
    return set(re.findall(r"(?<!torch )(?<!Python )(?<![\w.,-])\d+\.\d{2,}(?![\w.]*\d)", text))


def own_figures(page: Path) -> set[str]:
    """Those of a page's own words: blocks and generated parts left out."""
    return figures(re.sub(r"<!-- generated: .*?<!-- end of ", "", prose(page), flags=re.DOTALL))


@pytest.mark.parametrize("page", [page for page in PAGES if page not in (MEASUREMENTS, *LESSON)], ids=name_of)
def test_no_page_repeats_a_measured_figure_by_hand(page: Path) -> None:
    """docs/measurements.md has each once; the others link to it."""
    assert own_figures(page) & figures(prose(MEASUREMENTS)) == set()


def test_figures_are_found() -> None:
    assert figures("99.16 % (0.936 to 0.945), torch 2.13, 1.5, 12, v1.2.34") == {"99.16", "0.936", "0.945"}


# --- What the text names ---------------------------------------------------------------------------------------------


def anchor(heading: str) -> str:
    """As GitHub makes it from a heading."""
    return re.sub(r"[^\w -]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("guide", PAGES, ids=name_of)
def test_links_lead_somewhere(guide: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(guide)):
        if target.startswith("https://"):
            continue
        file, _, place = target.partition("#")
        aim = guide.parent / file if file else guide
        assert aim.exists(), target
        if place:
            assert place in map(anchor, re.findall(r"^#+ (.+)$", aim.read_text(), re.MULTILINE)), target


@pytest.mark.parametrize("guide", PAGES, ids=name_of)
def test_files_and_flags_that_are_named_exist(guide: Path) -> None:
    group: Any = typer.main.get_group(main_multi_gpu.app)
    below = [each for command in group.commands.values() for each in getattr(command, "commands", {}).values()]
    all_commands = [group, *group.commands.values(), *below]
    ours = {flag for each in all_commands for option in each.params for flag in option.opts}
    assert [line for line in prose(guide).splitlines() if line.count("`") % 2] == []  # code that spans lines hides
    for code in CODE.findall(prose(guide)):
        if PLACE.fullmatch(code):
            assert (ROOT / code).exists() or code.startswith("my_"), code
        if not re.match(r"python (?!main_multi_gpu)", code):
            assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", code)) <= ours | OTHERS_FLAGS, code


def test_every_page_is_reached_from_the_index() -> None:
    linked = {INDEX.parent / page for page in re.findall(r"\]\(([\w/-]+\.md)", INDEX.read_text())}
    assert set(ROOT.glob("docs/**/*.md")) - {INDEX} == linked
    assert "(docs/README.md)" in README.read_text()
    assert "(docs/README.md)" in GUIDE.read_text()


def test_only_the_migration_page_speaks_of_earlier_documents() -> None:
    said = re.compile(r"founding|earlier documents?\b|gave it its name", re.IGNORECASE)
    assert [name_of(page) for page in PAGES if said.search(page.read_text())] == ["docs/migration.md"]


def test_no_message_names_a_page() -> None:
    """An installed package has no docs/."""
    for file in ROOT.glob("multigpu_cli/**/*.py"):
        tree = ast.parse(file.read_text())
        docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in docstrings]
        assert not [node.value for node in texts if re.search(r"\bdocs/\w", str(node.value))], file


# --- The commands ----------------------------------------------------------------------------------------------------


def commands() -> list[str]:
    """Every call of the front door in a bash block, run or not, and in the text."""
    pages = [page for page in PAGES if page not in (HAVE, USAGE)]
    typed = [block.text for page in pages for block in blocks(page.read_text()) if block.language == "bash"]
    found = [line for text in typed for line in logical_lines(text)]
    found += [code for page in pages for code in CODE.findall(prose(page))]
    return [
        line
        for line in dict.fromkeys(found)
        if re.search(rf"(python|torchrun)\b.* {FRONT_DOOR}|^multigpu (?!--install)", line)
    ]


def migration_commands() -> list[str]:
    """Each call of the front door in the migration page that trains."""
    spans = CODE.findall((ROOT / "docs/migration.md").read_text())
    trains = re.compile(rf"^multigpu -|{FRONT_DOOR} -")
    return [span for span in spans if trains.search(span)]


def test_migration_page_has_commands_that_train() -> None:
    assert len(migration_commands()) >= 3


@pytest.mark.parametrize("line", migration_commands())
def test_migration_command_fits_model_and_data(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a dry run, which builds the model and tries a batch; torchrun's own options are left out."""
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line)
    start = next(index for index, word in enumerate(words) if word in ("multigpu", FRONT_DOOR))
    result = subprocess.run(
        [sys.executable, ROOT / FRONT_DOOR, *words[start + 1 :], "--dry-run"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def logical_lines(script: str) -> list[str]:
    joined = re.sub(r"\\\n\s*", "", script)
    return [re.split(r" [|>] | &&", line)[0] for line in joined.splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("line", commands())
def test_a_command_passes_the_door(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that need data or GPUs: flags, values and rules are checked before either is touched."""
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line, comments=True)
    at = next(place for place, word in enumerate(words) if word.endswith(FRONT_DOOR) or word == "multigpu")
    for flag in ("--data-dir", "--resume"):
        if flag in words:
            (tmp_path / words[words.index(flag) + 1]).mkdir(parents=True)
    for flag in ("--config", "--init-from", "--data", "--prompts"):
        file = tmp_path / words[words.index(flag) + 1] if flag in words else tmp_path
        if file.suffix:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("epochs: 2\n")
    group: Any = typer.main.get_group(main_multi_gpu.app)
    name, *rest = [*words[at + 1 :], ""]
    command = group.commands.get(name)
    if name == "data":
        command, rest = command.commands[rest[0]], rest[1:]
    context = (command or group).make_context("multigpu", rest[:-1] if command else words[at + 1 :])
    environment = {}
    if "torchrun" in words[:at]:
        count = next(re.sub(r".*=", "", word) for word in words[:at] if "nproc" in word)
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        environment = ranks | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    if "split" in context.params:
        context.params.pop("model_dir")  # that of the run
    if "data" in context.params:
        build_config(context.params, environment)


def test_every_block_is_run_or_says_why_not() -> None:
    assert [block for _, block in of_all() if block.not_run and not is_reason(block.not_run)] == []
    assert [block for _, block in of_all() if block.language not in NO_COMMANDS | {"bash"}] == []
    assert len(runnable()) >= 5


def test_no_block_writes_over_the_file_of_another() -> None:
    """A reader who changed the file of an earlier page would lose it."""
    typed = [block.text for page in PAGES for block in blocks(page.read_text()) if block.language == "bash"]
    names = [name for text in typed for name in re.findall(r"^cat > (\S+)", text, re.MULTILINE)]
    assert "my_code.py" in names
    assert sorted(names) == sorted(set(names))


def sections() -> dict[tuple[str, str], list[tuple[Path, Block]]]:
    """The blocks that run, by guide and chapter: those of one chapter may build on each other, others not."""
    found: dict[tuple[str, str], list[tuple[Path, Block]]] = {}
    for guide, block in runnable():
        before = guide.read_text().splitlines()[: block.line]
        chapter = next((line[3:] for line in reversed(before) if line.startswith("## ")), "")
        found.setdefault((name_of(guide), chapter), []).append((guide, block))
    return found


def mark_chapters() -> Iterator[Any]:
    """`make test-all` runs all, which takes minutes; CI those of the guide and of one more page."""
    often = {"MULTI_GPU_GUIDE.md", "docs/howto/your-code.md"}
    for guide, chapter in sections():
        marks = [] if guide in often else [pytest.mark.slow]
        yield pytest.param((guide, chapter), id=f"{guide}-{chapter}", marks=marks)


@pytest.mark.parametrize("section", list(mark_chapters()))
def test_the_blocks_of_a_chapter_run(section: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And say what the guide shows: each line of the text block that follows one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    project = copy_project(tmp_path)
    for guide, block in sections()[section]:
        code, output = run(block.text, project)
        assert code == 0, f"{guide.name}:{block.line}\n{block.text}\n{output[-6000:]}"
        said = {" ".join(line.split()) for line in output.splitlines()}
        assert [line for line in find_expected_lines(guide, block) if line not in said] == [], output[-6000:]


def find_expected_lines(guide: Path, block: Block) -> list[str]:
    """The lines of the text block that directly follows a bash block."""
    after = guide.read_text().split("\n", block.line - 1)[-1].partition(block.text)[2].removeprefix("```").lstrip()
    shown_next = re.match(r"```text\n(.*?)^```", after, re.MULTILINE | re.DOTALL)
    return [" ".join(line.split()) for line in shown_next[1].splitlines() if line.strip()] if shown_next else []


def test_shown_output_is_found() -> None:
    shown_blocks = [block for guide, block in runnable() if find_expected_lines(guide, block)]
    assert len(shown_blocks) >= 2


def test_the_reference_is_one_page() -> None:
    assert len(REFERENCE.read_text().splitlines()) <= 150
