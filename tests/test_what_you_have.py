"""Each row of docs/start/what-you-have.md by copy and paste: it trains, or is refused in the words that stand there."""

import runpy
import shlex
import sys
from pathlib import Path

import pytest

import main_multi_gpu
from tests.support.run_training import fork_ranks
from tests.support.walkthrough import ROOT, blocks
from tests.support.what_you_have import PAGE, Row, list_files, read_rows, type_row
from tests.test_readme import copy_project, run

ROWS = read_rows((ROOT / PAGE).read_text())
SHORT = ["--max-steps", "4"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, with the files that the page's blocks make."""
    folder = copy_project(tmp_path_factory.mktemp("newcomer"))
    made = [block.text for block in blocks((ROOT / PAGE).read_text()) if not block.not_run]
    for script in made:
        code, output = run(script, folder)
        assert code == 0, output
    return folder


def type_in(command: str, project: Path, capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and output of a command: of the front door and a loop from here, where torch is imported already."""
    words, code = shlex.split(command), 0
    if words[0] == "torchrun":
        fork_ranks(int(words[2].removeprefix("--nproc_per_node=")), lambda rank: runpy.run_path(words[3]), seconds=120)
    elif words[0] == "multigpu":
        code = main_multi_gpu.run(words[1:] + (SHORT if words[1].startswith("-") and SHORT[0] not in words else []))
    else:
        return run(command, project)
    return code, "".join(capfd.readouterr())


@pytest.mark.filterwarnings("ignore")  # of other packages; a user's process goes on, too
@pytest.mark.parametrize(
    "row",  # `make test` types what is refused and every fifth of the others; `make test-all` types all
    [
        pytest.param(row, id=row.have, marks=() if row.refused or number % 5 == 0 else pytest.mark.slow)
        for number, row in enumerate(ROWS)
    ],
)
def test_a_row_does_what_it_says(
    row: Row, project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delitem(sys.modules, "my_samples", raising=False)
    wrong = type_row(row, lambda command: type_in(command, project, capfd), project)
    assert not wrong, wrong


def test_there_are_thirty_and_each_says_what_it_prints() -> None:
    assert len(ROWS) >= 30
    assert [row.have for row in ROWS if not row.commands or not row.prints] == []


def test_what_a_row_does_else_is_noticed(tmp_path: Path) -> None:
    trains, refused = read_rows("| a | `x` `y` | `done` |\n| b | `x` | refused: `no such` |\n")
    assert (trains, refused) == (Row("a", ["x", "y"], False, ["done"]), Row("b", ["x"], True, ["no such"]))
    assert not type_row(trains, lambda command: (0, "is\ndone"), tmp_path)
    assert not type_row(refused, lambda command: (2, "no\n  such"), tmp_path)
    assert "exit code 2" in type_row(trains, lambda command: (2, "done"), tmp_path)
    assert "did not print 'done'" in type_row(trains, lambda command: (0, ""), tmp_path)
    assert "exit code 0" in type_row(refused, lambda command: (0, "no such"), tmp_path)
    assert "several messages" in type_row(refused, lambda command: (2, "no such\nmore"), tmp_path)
    assert "a traceback" in type_row(refused, lambda command: (2, "Traceback: no such"), tmp_path)

    def touch(command: str) -> tuple[int, str]:
        (tmp_path / "left" / "empty").mkdir(parents=True)
        return 2, "no such"

    assert f"touched {tmp_path / 'left'}, touched {tmp_path / 'left/empty'}" in type_row(refused, touch, tmp_path)
    (tmp_path / "__pycache__").mkdir()
    assert set(list_files(tmp_path)) == {tmp_path / "left", tmp_path / "left" / "empty"}
