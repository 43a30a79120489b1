"""The command `checkpoints`: a table, JSON, an exit code."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import main_multi_gpu
from multigpu_cli.checkpoint.store import Store
from tests.test_house_rules import ROOT


@pytest.fixture
def run(tmp_path: Path) -> Path:
    store = Store(tmp_path / "checkpoints", 10)
    for step in (10, 20):
        store.save(step, {"w": torch.ones(2)}, {"world_size": 1})
    return tmp_path


def test_the_newest_whole_one_is_pointed_out(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_multi_gpu.run(["checkpoints", str(run)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("checkpoints/step_00000010 ")
    assert re.search(r" \d+ s ago  1 worker    whole$", first)
    assert second.endswith("valid; a run resumes from here")


def test_damage_is_named_and_decides_the_exit_code(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints/step_00000020/state.pt").write_bytes(b"torn")
    assert main_multi_gpu.run(["checkpoints", str(run)]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("a run resumes from here")
    assert "damaged: state.pt has 4 bytes instead of" in second


def test_where_none_is_left_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("")
    assert main_multi_gpu.run(["checkpoints", str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"{tmp_path} has no checkpoint to resume from\n"


def test_a_wrong_folder_is_a_wrong_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_multi_gpu.run(["checkpoints", str(tmp_path / "x")]) == 2
    assert "x is not a run folder" in capsys.readouterr().err


def test_json_says_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_multi_gpu.run(["checkpoints", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["run"], found["healthy"]) == (str(run), True)
    assert [(entry["step"], entry["resumes"]) for entry in found["checkpoints"]] == [(10, False), (20, True)]


def test_it_does_without_torch(run: Path) -> None:
    code = (
        "import sys, main_multi_gpu\n"
        f"code = main_multi_gpu.run(['checkpoints', {str(run)!r}])\n"
        "sys.exit(code or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
