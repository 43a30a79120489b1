"""What the Tab key offers, asked for as bash, zsh and fish ask."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import main_multi_gpu
from multigpu_cli.commands.options import complete_run_folders, offer_for

PROGRAM = """
import sys
sys.argv[0] = "multigpu"
import main_multi_gpu
try:
    main_multi_gpu.main()
finally:
    assert "torch" not in sys.modules
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs, and a recipe of one's own."""
    for run in ("mine", "checkpoints/digits/20260101-000000-abcd"):
        (tmp_path / run).mkdir(parents=True)
        (tmp_path / run / "journal.jsonl").write_text("")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/ours.yaml").write_text("seed: 1\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def completions(shell: str, line: str) -> str:
    """The answer to a shell in which somebody has typed the line."""
    words = line.split(" ")
    environ = {
        "_MULTIGPU_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | environ | {"PYTHONPATH": str(Path(main_multi_gpu.__file__).parent)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_script_is_not_completed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["main_multi_gpu.py"])
    assert main_multi_gpu.run(["--show-completion"]) == 2
    assert "error: --show-completion: shells complete the installed program only" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_names_are_offered_to_every_shell(shell: str, folder: Path) -> None:
    told = completions(shell, "multigpu --data fa")
    assert "fashion-mnist" in told
    assert "digits" not in told


def test_sub_commands_and_their_runs_are_offered(folder: Path) -> None:
    assert completions("bash", "multigpu sta").split() == ["status"]
    assert completions("bash", "multigpu status ").split() == [
        "checkpoints/digits/20260101-000000-abcd",
        "mine",
    ]


@pytest.mark.parametrize(
    ("key", "metavar", "start", "offered"),
    [
        ("model", "NAME", "conv", ["convnet"]),
        ("task", "NAME", "class", ["classification"]),
        ("config", "FILE|NAME", "our", ["ours"]),
        ("set", "KEY=VALUE", "epo", ["epochs="]),
        ("multi_gpu", "auto|ddp|dp|none", "d", ["ddp", "dp"]),
        ("batch_size", "N|auto", "", ["auto"]),
        ("save_dir", "PATH", "mi", ["mine"]),
        ("resume", "PATH", "", ["auto", "never", "checkpoints/digits/20260101-000000-abcd", "mine"]),
    ],
)
def test_each_option_offers_what_it_takes(key: str, metavar: str, start: str, offered: list[str], folder: Path) -> None:
    offer = offer_for(key, metavar)
    assert offer is not None
    assert offer(start) == offered


def test_files_are_left_to_the_shell() -> None:
    assert offer_for("data_dir", "PATH") is None
    assert offer_for("lr", "X") is None


def test_run_folders_keep_the_way_they_are_written(folder: Path) -> None:
    assert complete_run_folders("checkpoints/") == ["checkpoints/digits/20260101-000000-abcd"]
    assert complete_run_folders("./m") == ["./mine"]
    assert complete_run_folders(f"{folder}/m") == [f"{folder}/mine"]
    assert complete_run_folders("nowhere/x") == []
