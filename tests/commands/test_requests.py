"""What a command asks for is refused before torch is loaded wherever that can be known."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from multigpu_cli.commands import requests
from multigpu_cli.commands.requests import build_config, parse_export_target, parse_worker_counts
from multigpu_cli.config.code_names import describe_origin
from multigpu_cli.config.paths import find_recipes
from multigpu_cli.config.rules import OWN_RUN_ID
from multigpu_cli.config.schema import Config
from multigpu_cli.config.sources import resolve
from multigpu_cli.errors import RequestError
from tests.test_house_rules import ROOT


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("weights", r"must end in \.safetensors, \.pt, \.pt2, \.onnx\n.*--format hf or adapter or merged"),
        ("weights.pth", "must end in"),
        ("there.pt", "it already exists"),
        ("nowhere/weights.pt", "there is no folder nowhere"),
    ],
)
def test_a_wrong_target_is_refused(to: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.pt").write_text("")
    with pytest.raises(RequestError, match=message):
        parse_export_target(to)


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "find_spec", lambda name: None if name == "onnxscript" else name)
    with pytest.raises(RequestError) as refused:
        parse_export_target("model.onnx")
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


THEIRS: dict[str, Any] = {
    "mirror": "s3://their-bucket/run",
    "logger": ["mlflow", "theirs:Log"],
    "schedule": "theirs:rate",
    "model": {"name": "theirs:net", "args": {"of": "theirs:block", "width": 3}},
    "task": {"name": "classification", "args": {"where": "a:x", "address": "https://me@host/x"}},
}


def read_origin(settings: dict[str, Any], environ: dict[str, str] | None = None, **options: Any) -> str:
    Path("theirs.yaml").write_text(json.dumps(settings))
    return build_config({"config": "theirs.yaml"} | options, environ or {}).from_files


def test_what_only_a_file_asks_for_is_known(in_tmp_path: None) -> None:
    told = (
        "--config theirs.yaml: --model theirs:net, model.args.of=theirs:block, task.args.where=a:x, "
        "--schedule theirs:rate, --logger theirs:Log, --logger mlflow, --mirror s3://their-bucket/run"
    )
    assert read_origin(THEIRS) == told
    own: dict[str, Any] = {
        "mirror": "file:mine",
        "logger": ["mlflow", "mine:Log"],
        "model": "mlp",
        "set": ["task.args.where=a:x"],
    }
    assert read_origin(THEIRS, **own) == "--config theirs.yaml: --schedule theirs:rate"
    assert read_origin({"epochs": 3, "data": "digits", "model": "mlp"}) == ""
    prompts = resolve({"prompts": "theirs.jsonl"}, (), None)
    assert describe_origin(prompts, Config(), "theirs.yaml") == "theirs.yaml: --prompts theirs.jsonl"


def test_a_password_in_it_is_hidden(in_tmp_path: None) -> None:
    named = {"data": "text", "model": {"name": "transformers", "args": {"id": "https://me:hush@host/x"}}}
    assert read_origin(named) == "--config theirs.yaml: model.args.id=https://…@host/x"


def test_only_a_file_of_our_own_launcher_says_where_its_settings_came_from(in_tmp_path: None) -> None:
    """Else somebody's file could say that nothing came from it."""
    faked = THEIRS | {"from_files": ""}
    with pytest.raises(RequestError, match=r"theirs\.yaml:1: from_files: there is no such setting"):
        read_origin(faked)
    ours = faked | {"from_files": "--config x: y"}
    assert read_origin(ours, {"TORCHELASTIC_RUN_ID": f"{OWN_RUN_ID}1"}) == "--config x: y"


@pytest.mark.parametrize("name", find_recipes())
def test_a_recipe_of_ours_asks_for_nothing_of_that_kind(name: str) -> None:
    assert describe_origin(resolve({}, (), name), Config(), name) == ""
