"""CONTRIBUTING.md: its steps work as they are written, and its rules are those that are checked."""

import re
from pathlib import Path

import pytest

from tests.support.walkthrough import ROOT, Block, blocks, script
from tests.test_house_rules import RULES
from tests.test_readme import NO_COMMANDS, copy_project, is_reason, run

TEXT = (ROOT / "CONTRIBUTING.md").read_text()


def runnable() -> list[Block]:
    return [block for block in blocks(TEXT) if block.language == "bash" and not block.not_run]


def test_every_block_is_run_or_says_why_not() -> None:
    assert [block for block in blocks(TEXT) if block.not_run and not is_reason(block.not_run)] == []
    assert [block for block in blocks(TEXT) if block.language not in NO_COMMANDS | {"bash"}] == []
    assert len(runnable()) >= 6


@pytest.mark.slow
def test_a_dataset_a_model_a_task_and_a_strategy_are_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, output = run(script(runnable()), copy_project(tmp_path))
    assert code == 0, output[-6000:]
    assert re.search(r"linear on counts .*, poisson", output), output[-6000:]
    assert "mae" in output


def test_each_rule_of_the_house_is_described() -> None:
    table = TEXT.partition("## House rules")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \| \S", table, re.MULTILINE) == [rule.__name__ for rule in RULES], "in their order"


def test_the_files_that_it_names_are_there() -> None:
    named = {*re.findall(r"`((?:multigpu_cli|tests|\.ci)/[\w./-]*)`", TEXT), *re.findall(r"\]\(([\w.]+)\)", TEXT)}
    assert len(named) >= 6
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
    targets = re.findall(r"`make ([\w-]+)`", TEXT)
    makefile = (ROOT / "Makefile").read_text()
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []
