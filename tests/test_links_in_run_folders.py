"""A run folder that came from somebody else: nothing is written or removed through a symbolic link in it."""

from pathlib import Path
from typing import Any

import pytest
import torch

import main_multi_gpu
from multigpu_cli.checkpoint.store import Store
from multigpu_cli.config.regular_files import FOLDERS, UnsafeFolder, refuse_links
from multigpu_cli.errors import WRONG_REQUEST
from tests.commands.runs import interrupted_run
from tests.distributed.forked import run_forked
from tests.distributed.launcher import torchrun
from tests.support.run_training import run_training

pytestmark = pytest.mark.usefixtures("in_tmp_path")
LOGGER = "tests.support.recording_logger:Recorder"
ENTRIES = (
    "config.yaml", "journal.jsonl", "summary.json", "best.pt", "last.pt", "samples.jsonl",
    "tensorboard", "tensorboard/events", "logs", "logs/rank_1.log", "logs/mirror.log",
    "checkpoints", "checkpoints/step_00000010", "checkpoints/step_00000010/state.pt",
    "checkpoints/step_00000010/manifest.json", "checkpoints/.draft_step_00000030", ".summary.json.7.draft",
    ".lock", ".mirror.lock", "mirror.json", "loggers", "loggers/x.json", "loggers/x.lock", "loggers/wandb",
    ".began_from", "next_attempt.json", "plan.json", "report", "report/report.html", "report/loss.png",
)  # fmt: skip
COMMANDS = (
    ["--save-dir", "run"],
    ["clean", "run", "--yes"],
    ["--resume", "run"],
    ["report", "run"],
    ["mirror", "run", "--to", "file:there"],
    ["log", "run", "--to", LOGGER],
    ["plan", "--save-dir", "run"],
)


@pytest.fixture
def run() -> Path:
    """A completed run with two checkpoints, which `clean` would remove."""
    folder = interrupted_run(Path("run"))
    for step in (10, 20):
        Store(folder / "checkpoints", 10).save(step, {"w": torch.ones(9)}, {"world_size": 1})
    torch.save({"w": torch.ones(9)}, folder / "best.pt")
    return folder


def content(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder below, through links too."""
    found = {}
    for entry in folder.iterdir():
        found[str(entry)] = entry.read_bytes() if entry.is_file() else None
        found |= content(entry) if entry.is_dir() else {}
    return found


def put_link(run: Path, entry: str) -> Path:
    """Move what is there elsewhere, and lead to it."""
    link, target = run / entry, Path("elsewhere", "precious").absolute()
    target.parent.mkdir()
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.exists():
        link.rename(target)
    else:
        target.write_text("precious")
    link.symlink_to(target)
    return link


@pytest.mark.filterwarnings("ignore:.* is damaged, and not used")
@pytest.mark.parametrize("entry", ENTRIES)
def test_whatever_is_a_link_is_refused_and_nothing_is_touched(
    entry: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = put_link(run, entry)
    before = content(Path())
    for command in COMMANDS[:2]:
        assert main_multi_gpu.run(command) == WRONG_REQUEST
        shown = capsys.readouterr().err
        assert f"error: {link} is a symbolic link: nothing in a run folder is written or removed through one" in shown
    assert content(Path()) == before


@pytest.mark.parametrize("command", COMMANDS[2:], ids=" ".join)
def test_whatever_writes_there_refuses_it(command: list[str], run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    link = put_link(run, "logs")
    before = content(Path())
    assert main_multi_gpu.run(command) == WRONG_REQUEST
    assert f"error: {link} is a symbolic link" in capsys.readouterr().err
    assert content(Path()) == before


def test_the_list_has_whatever_a_run_writes() -> None:
    flags: dict[str, Any] = {
        "logger": [LOGGER],
        "mirror": "file:there",
        "trace_samples": True,
        "save_dir": "run",
        "epochs": 2,
    }
    assert run_training(2, **flags).error == ""
    known = {entry.partition("/")[0] for entry in ENTRIES}
    assert {entry.name for entry in Path("run").iterdir()} <= known
    assert {entry.name for entry in Path("run").iterdir() if entry.is_dir()} == set(FOLDERS) - {"report"}


def test_a_project_that_is_the_run_folder_has_links_of_its_own(tmp_path: Path) -> None:
    Path(".venv", "bin").mkdir(parents=True)
    Path(".venv", "bin", "python").symlink_to("/usr/bin/env")
    Path("images").symlink_to("/usr/share")
    assert run_training(save_dir=str(tmp_path), epochs=1).error == ""
    assert run_training(save_dir=str(tmp_path), epochs=2).summary["epochs"] == 2
    Path("logs").rename("elsewhere")
    Path("logs").symlink_to("elsewhere")
    assert "logs is a symbolic link" in run_training(save_dir=str(tmp_path), epochs=3).error


def test_under_torchrun_no_rank_begins_and_the_keys_stay_what_they_are(tmp_path: Path) -> None:
    keys = tmp_path / "authorized_keys"
    keys.write_text("ssh-ed25519 AAAA")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(keys)
    ended = run_forked(torchrun(2, save_dir="run", epochs=1, batch_size=500), tmp_path, forked_workers=2)
    assert "error: run/.lock is a symbolic link" in ended.stderr
    assert (ended.returncode != 0, keys.read_text()) == (True, "ssh-ed25519 AAAA")
    assert [file.name for file in Path("run").iterdir()] == [".lock"]


def test_the_folder_itself_may_be_a_link_and_w_and_b_has_its_own(run: Path) -> None:
    Path("short").symlink_to(run)
    wandb = run / "loggers" / "wandb"
    (wandb / "offline-run-1").mkdir(parents=True)
    (wandb / "latest-run").symlink_to("offline-run-1")
    refuse_links(Path("short"))
    (wandb / "debug.log").symlink_to(Path("best.pt").absolute())
    with pytest.raises(UnsafeFolder, match=r"short/loggers/wandb/debug\.log is a symbolic link"):
        refuse_links(Path("short"))
