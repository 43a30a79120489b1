"""The pre-commit hooks run what `make lint` runs, and the CI workflow what `.ci/run` runs."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.pythons import VERSIONS

ROOT = Path(__file__).resolve().parents[1]


def hooks() -> list[dict[str, Any]]:
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repo["repo"] == "local", "others would be downloaded"
    return repo["hooks"]  # type: ignore[no-any-return]


def list_lint_commands() -> list[list[str]]:
    """The commands of `make lint`, without those that install."""
    dry = ["make", "--dry-run", "--no-print-directory", "lint", "VENV=.venv", "--assume-old=.venv/.installed-dev"]
    lines = subprocess.run(dry, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    tools = (shlex.split(line) for line in lines)
    return [words for words in tools if Path(words[0]).name in {"ruff", "mypy", "shellcheck"}]


def called_by_hand(words: list[str]) -> str:
    """ruff check, mypy, …"""
    tool = Path(words[0]).name
    return f"{tool} {words[1]}" if tool == "ruff" else tool


def test_the_hooks_are_the_commands_of_make_lint() -> None:
    called = {hook["name"]: shlex.split(hook["entry"]) for hook in hooks()}
    assert [hook["language"] for hook in hooks()] == ["system"] * len(called)
    assert list(called) == [called_by_hand(words) for words in list_lint_commands()]
    for words in called.values():
        assert words[0].startswith(".venv/bin/")
        assert (Path(sys.executable).parent / Path(words[0]).name).exists(), words


def test_the_shell_files_are_those_of_make_lint() -> None:
    pattern = next(hook["files"] for hook in hooks() if hook["id"] == "shellcheck")
    files = next(words for words in list_lint_commands() if called_by_hand(words) == "shellcheck")[1:]
    assert files
    assert [file for file in files if not re.search(pattern, file)] == []
    assert not re.search(pattern, "tests/test_habits.py")


@pytest.mark.parametrize("failing", ["", "ruff", "mypy", "pytest"])
def test_make_test_fails_where_one_of_its_parts_does(failing: str, tmp_path: Path) -> None:
    """mypy runs beside the tests, and whichever of the two fails counts."""
    (tmp_path / "bin").mkdir()
    for tool in ("ruff", "shellcheck", "mypy", "pytest", "python"):
        program = tmp_path / "bin" / tool
        program.write_text(f"#!/bin/sh\necho ran {tool}\nexit {int(tool == failing)}\n")
        program.chmod(0o755)
    (tmp_path / ".installed-dev").touch()
    done = subprocess.run(["make", "test", f"VENV={tmp_path}"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (failing == ""), done.stderr
    assert ("mypy: errors, see above" in done.stdout.splitlines()) == (failing == "mypy")
    assert {"ran mypy", "ran pytest"} <= set(done.stdout.splitlines()) or failing == "ruff"


def test_the_workflow_runs_what_runs_here_and_may_only_read() -> None:
    workflow = yaml.load((ROOT / ".github/workflows/ci.yml").read_text(), yaml.BaseLoader)  # noqa: S506 - "on" stays text
    assert {"push", "pull_request"} <= workflow["on"].keys()
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    *others, last = job["steps"]
    assert last["run"] == ".ci/run"
    assert os.access(ROOT / last["run"], os.X_OK)
    assert [step["uses"] for step in others if not re.fullmatch(r"actions/[\w-]+@v\d+\.\d+\.\d+", step["uses"])] == []
    project = (ROOT / "pyproject.toml").read_text()
    (names,) = (step["with"]["python-version"] for step in others if "python-version" in step.get("with", {}))
    assert sorted(versions := names.split()) == list(VERSIONS)
    assert [f">={versions[-1]}"] == re.findall(r'^requires-python = "(.*)"', project, re.MULTILINE)
