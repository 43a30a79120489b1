"""Each row of docs/guide/what-you-have.md by copy and paste: it trains, or is refused in the words that stand there."""

import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import main_multi_gpu
from tests.support.walkthrough import blocks
from tests.test_readme import copy_project, run

PAGE = Path(__file__).resolve().parents[1] / "docs" / "guide" / "what-you-have.md"
SHAPES = PAGE.with_name("batches.md")
CODE = re.compile(r"`([^`]+)`")
SHORT = ["--max-steps", "4"]
OWN_MODULES = ("my_code", "my_batches")


class Row(NamedTuple):
    """What somebody has, the commands, whether the last one is refused, and what it prints."""

    have: str
    commands: list[str]
    refused: bool
    prints: list[str]


def rows() -> list[Row]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "what you type" not in line]
    return [read_row(*(cell.strip() for cell in line.strip("|").split(" | "))) for line in lines]


def read_row(have: str, commands: str, happens: str) -> Row:
    return Row(have, CODE.findall(commands), happens.startswith("refused"), CODE.findall(happens))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, with the files that the page's blocks make, and that of the page on shapes of samples."""
    folder = copy_project(tmp_path_factory.mktemp("newcomer"))
    made = [block.text for block in blocks(PAGE.read_text())]
    made += [block.text.partition("\npython ")[0] for block in blocks(SHAPES.read_text()) if "cat >" in block.text]
    for script in made:
        code, output = run(script, folder)
        assert code == 0, output
    return folder


def type_in(command: str, project: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and output of a command: of the front door in this process, where torch is imported already."""
    words = shlex.split(command)
    if words[:2] != ["python", "main_multi_gpu.py"]:
        return run(command, project)
    code = main_multi_gpu.run(words[2:] + (SHORT if words[2].startswith("-") and SHORT[0] not in words else []))
    return code, "".join(capsys.readouterr())


def list_files(folder: Path) -> dict[Path, int]:
    """Everything in a folder, with the time of its last change; not what Python makes of imported modules."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if "__pycache__" not in path.parts}


@pytest.mark.filterwarnings("ignore")  # of other packages; a user's process goes on, too
@pytest.mark.parametrize(
    "row",  # `make test` types what is refused and every fifth of the others; `make test-all` types all
    [
        pytest.param(row, id=row.have, marks=() if row.refused or number % 5 == 0 else pytest.mark.slow)
        for number, row in enumerate(rows())
    ],
)
def test_a_row_does_what_it_says(
    row: Row, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in OWN_MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    outputs = []
    for at, command in enumerate(row.commands, start=1):
        refused, before = row.refused and at == len(row.commands), list_files(project)
        code, output = type_in(command, project, capsys)
        assert code == (2 if refused else 0), output
        assert not refused or list_files(project) == before, "what is refused touches nothing"
        outputs.append(" ".join(output.split()))
    assert "Traceback" not in outputs[-1]
    assert [words for words in row.prints if words not in outputs[-1]] == [], outputs[-1]


def test_there_are_thirty_and_each_says_what_it_prints() -> None:
    assert len(rows()) >= 30
    assert [row.have for row in rows() if not row.commands or not row.prints] == []
