"""`make quickstart`, as a new user types it: the README's first command."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_readme import copy_project


def quickstart(project: Path, *overrides: str) -> str:
    """Run it in a copy of the project; its output."""
    environment = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "OMP_NUM_THREADS")}
    done = subprocess.run(
        ["make", "quickstart", *overrides], cwd=project, env=environment, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def check(output: str, project: Path) -> None:
    found = re.search(r"test accuracy\s+([\d.]+) %", output)
    assert found
    assert float(found[1]) >= 97.0
    assert re.search(r"fingerprint\s+[0-9a-f]{64}", output)
    folder = re.search(r"save dir\s+(\S+)", output)
    assert folder
    assert (project / folder[1] / "summary.json").is_file()


def test_it_trains_the_digits(tmp_path: Path) -> None:
    """With the environment at hand: the installing is left out, and 13 of 20 epochs."""
    environment = Path(sys.executable).parent.parent
    if not (environment / ".installed").exists():
        pytest.skip(f"{environment} was not made by the Makefile")
    project, python = copy_project(tmp_path), tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase $1 in main*) set -- "$@" --epochs 7;; esac\nexec {environment}/bin/python "$@"\n'
    )
    python.chmod(0o755)
    installed = ["--old-file", str(environment / ".installed")]
    check(quickstart(project, f"VENV={environment}", f"BIN={tmp_path}", *installed), project)


@pytest.mark.slow
def test_it_installs_into_a_fresh_environment(tmp_path: Path) -> None:
    project = copy_project(tmp_path)
    check(quickstart(project, f"PYTHON={getattr(sys, '_base_executable', sys.executable)}"), project)
