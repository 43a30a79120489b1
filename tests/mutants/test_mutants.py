"""The whole tool on a toy tree: what is tested there is noticed, what is not survives, and what is done stays done."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.tracing import ROOMS

ROOT = Path(__file__).resolve().parents[2]
CODE = """def larger(a, b):
    return a if a > b else b


def unlooked(a):
    return bool(a)
"""
TEST = """from multiprocessing import get_context

from multigpu_cli.planning.toy import larger


def test_in_a_fork():
    fork = get_context("fork").Process(target=lambda: exit(larger(1, 2) + larger(4, 3)))
    fork.start()
    fork.join()
    assert fork.exitcode == 6
"""


def toy(root: Path) -> Path:
    package = root / "multigpu_cli"
    for room in ROOMS:
        (package / room).parent.mkdir(parents=True, exist_ok=True)
        (package / room).touch() if room.endswith(".py") else (package / room).mkdir()
    for file in (package / "__init__.py", package / "planning" / "__init__.py"):
        file.touch()
    (package / "planning" / "toy.py").write_text(CODE)
    (root / "tests" / "planning").mkdir(parents=True)
    (root / "tests" / "planning" / "test_toy.py").write_text(TEST)
    shutil.copytree(ROOT / "tests" / "mutants", root / "tests" / "mutants")
    (root / "tests" / "mutants" / "equivalent.yaml").write_text("[]")
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "--import-mode=importlib"\n')
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    return root


def mutants(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.mutants", "--workers", "1", "--folder", str(root / "found"), *words]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_what_is_tested_is_killed_and_the_rest_survives(tmp_path):
    root = toy(tmp_path)
    ended = mutants(root)
    results = [json.loads(line) for line in (root / "found" / "results.jsonl").read_text().splitlines()]
    assert {(result["diff"].splitlines()[-1], result["diff"].split()[1], result["verdict"]) for result in results} == {
        ("+return a if a >= b else b", "larger", "survived"),
        ("+return a if not (a > b) else b", "larger", "killed"),
        ("+return None", "larger", "killed"),
        ("+return None", "unlooked", "survived"),
    }
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "survived: 50.0% of 4" in ended.stdout
    assert (root / "multigpu_cli" / "planning" / "toy.py").read_text() == CODE
    again = mutants(root)
    assert again.stdout.splitlines()[-1] == ended.stdout.splitlines()[-1]
    assert len((root / "found" / "results.jsonl").read_text().splitlines()) == len(results)
