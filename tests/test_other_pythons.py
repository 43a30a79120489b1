"""A small training with each other supported Python that this machine has; see tests/support/pythons.py."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from multigpu_cli.monitor.journal import read_events
from tests.support.pythons import ROOT, find_python, make_environment

FLAGS = ("--exact", "--global-batch-size", "64", "--max-steps", "25", "--log-interval", "1", "--json", "--quiet")


def train(python: Path | str, folder: Path, *flags: str) -> dict[str, Any]:
    command = [str(python), str(ROOT / "main_multi_gpu.py"), *FLAGS, "--save-dir", str(folder), *flags]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(command, cwd=folder.parent, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    summary: dict[str, Any] = json.loads(ended.stdout)
    return summary


@pytest.fixture(scope="module")
def this_fingerprint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the same training with this Python, on one worker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        return str(train(sys.executable, tmp_path_factory.mktemp("this") / "run", "--multi-gpu", "none")["fingerprint"])


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_training_has_the_same_fingerprint_with_another_python(
    version: str, this_fingerprint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        pytest.skip(f"Python {version} runs all other tests")
    python = find_python(version)
    if python is None:
        pytest.skip(f"no Python {version} on PATH or in pyenv")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    other = train(make_environment(version, python), tmp_path / "run", "--multi-gpu", "ddp", "--nproc-per-node", "2")
    assert other["world_size"] == 2
    (start,) = (event for event in read_events(tmp_path / "run/journal.jsonl") if event["event"] == "start")
    versions = start["versions"]
    assert versions["python"].startswith(f"{version}.")
    if versions["torch"].partition("+")[0] != torch.__version__.partition("+")[0]:
        pytest.skip(f"pip installs torch {versions['torch']} there, so bits may differ")
    assert other["fingerprint"] == this_fingerprint
