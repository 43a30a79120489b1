"""What a command asks for is refused before torch is loaded wherever that can be known."""

import subprocess
import sys
from pathlib import Path

import pytest

from multigpu_cli.commands import requests
from multigpu_cli.commands.requests import parse_export_target, parse_worker_counts
from multigpu_cli.errors import RequestError
from tests.test_house_rules import ROOT


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("weights", r"must end in \.safetensors, \.pt, \.pt2, \.onnx\n.*--format hf or adapter or merged"),
        ("weights.pth", "must end in"),
        ("there.pt", "it exists already"),
        ("nowhere/weights.pt", "there is no folder nowhere"),
    ],
)
def test_a_wrong_target_is_refused(to: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.pt").write_text("")
    with pytest.raises(RequestError, match=message):
        parse_export_target(to, ".")


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "find_spec", lambda name: None if name == "onnxscript" else name)
    with pytest.raises(RequestError) as refused:
        parse_export_target("model.onnx", ".")
    assert refused.value.problem == "--to model.onnx needs onnxscript"
    assert refused.value.remedy == "pip install onnx onnxscript onnxruntime"


def test_a_missing_checkpoint_is_refused_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys, main_multi_gpu\n"
        "code = main_multi_gpu.run(['export', 'missing', '--to', 'w.safetensors'])\n"
        "sys.exit(code if 'torch' not in sys.modules else 99)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "missing: there is no such file or folder" in ended.stderr


def test_numbers_of_workers_are_read() -> None:
    assert parse_worker_counts("4,2,4") == [1, 2, 4]
    for word in ("0", "1.5", "x", ""):
        with pytest.raises(RequestError, match="--workers must be a whole number of at least 1, not "):
            parse_worker_counts(f"2,{word}")
