"""Each row of docs/guide/what-you-have.md, by copy and paste: it trains, or is refused in the words that stand there."""

import os
import re
import shlex
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch._dynamo  # here once, and not again in each forked process
import torch.utils.tensorboard  # noqa: F401

import main_multi_gpu
import train_multi_gpu  # noqa: F401
from tests.support.fork import exit_code
from tests.support.walkthrough import blocks
from tests.test_readme import copy_project, run

PAGE = Path(__file__).resolve().parents[1] / "docs" / "guide" / "what-you-have.md"
CODE = re.compile(r"`([^`]+)`")
SHORT = ["--max-steps", "4"]


class Row(NamedTuple):
    """What somebody has, the commands, whether the last is refused, and what it prints."""

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
    """A copy of the project, with the files that the page's blocks make."""
    folder = copy_project(tmp_path_factory.mktemp("newcomer"))
    for block in blocks(PAGE.read_text()):
        code, output = run(block.text, folder)
        assert code == 0, output
    return folder


def type_in(command: str, project: Path) -> tuple[int, str]:
    """Exit code and output of a command; one of the front door is forked, since torch is imported here already."""
    words = shlex.split(command)
    if words[:2] != ["python", "main_multi_gpu.py"]:
        return run(command, project)
    printed = project / "printed.txt"
    argv = words[2:] + (SHORT if words[2].startswith("-") else [])
    return exit_code(lambda: work(argv, project, printed)), printed.read_text()


def work(argv: list[str], project: Path, printed: Path) -> None:
    os.chdir(project)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    warnings.simplefilter("ignore")  # pytest makes errors of them
    sys.stdout = sys.stderr = printed.open("w")
    for descriptor in (1, 2):
        os.dup2(sys.stdout.fileno(), descriptor)
    main_multi_gpu.leave(main_multi_gpu.run(argv))


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.have)
def test_a_row_does_what_it_says(row: Row, project: Path) -> None:
    *before, last = row.commands
    for command in before:
        code, output = type_in(command, project)
        assert code == 0, output
    code, output = type_in(last, project)
    assert code == (2 if row.refused else 0), output
    assert "Traceback" not in output
    said = " ".join(output.split())
    assert [words for words in row.prints if words not in said] == [], output


def test_there_are_thirty() -> None:
    assert len(rows()) >= 30
