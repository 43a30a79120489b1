"""No way into the program runs code from a file of weights, though its checksums are right."""

from pathlib import Path
from typing import Any

import pytest

import main_multi_gpu
from tests.support.malicious_files import poison, poison_and_sign
from tests.support.run_training import run_training

RUN: dict[str, Any] = {"save_dir": "run", "batch_size": 30}


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What an attack would make. Beside it lies a run whose checkpoint and best.pt are poisoned."""
    monkeypatch.chdir(tmp_path)
    assert run_training(**RUN, epochs=1).error == ""
    poison_and_sign(Path("run/checkpoints/step_00000002"), tmp_path / "attacked")
    poison(Path("run/best.pt"), tmp_path / "attacked", {"model": {}, "config": {}})
    return tmp_path / "attacked"


@pytest.mark.parametrize("flags", [{"epochs": 2}, {"resume": "run", "save_dir": "other"}], ids=["auto", "from a path"])
def test_a_resume_refuses_it(flags: dict[str, object], target: Path) -> None:
    before = sorted(path.name for path in Path("run").rglob("*"))
    ended = run_training(**RUN | flags)
    assert ended.kind == "RequestError"
    assert "step_00000002/state.pt can't be loaded safely as weights" in ended.error
    assert not target.exists()
    assert sorted(path.name for path in Path("run").rglob("*")) == before


def test_a_start_from_somebodys_weights_refuses_it(target: Path) -> None:
    ended = run_training(**RUN | {"save_dir": "new", "init_from": "run/best.pt"}, epochs=1)
    assert "--init-from run/best.pt can't be loaded safely as weights" in ended.error
    assert not target.exists()


@pytest.mark.parametrize("argv", [["checkpoints", "run"], ["export", "run", "--to", "w.pt"], ["verify", "run", "run"]])
def test_no_command_runs_it(argv: list[str], target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main_multi_gpu.run(argv)
    assert code == {"checkpoints": 1, "export": 2, "verify": 0}[argv[0]]
    assert not target.exists()
    assert not Path("w.pt").exists()
    said = "".join(capsys.readouterr())
    assert "mkdir when loaded" in said or "loaded safely" in said or argv[0] == "verify"
