"""Checkpoints of finished runs can go; all else stays."""

import json
import os
from pathlib import Path

import pytest
import torch

import main_multi_gpu
from multigpu_cli.checkpoint.files import lock_folder
from multigpu_cli.checkpoint.store import Store
from tests.commands.runs import SUMMARY, run_folder
from tests.support.run_training import run_training


def finished(folder: Path, status: str = "completed") -> Path:
    run = run_folder(folder, [], SUMMARY | {"status": status})
    store = Store(run / "checkpoints", 10)
    for step in (10, 20):
        store.save(step, {"w": torch.ones(1000)}, {"world_size": 1})
    torch.save({"w": torch.ones(1000)}, run / "best.pt")
    return run


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_it_shows_first_and_removes_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a completed run; one that is at work, was stopped, or has lost its best weights keeps everything."""
    done, stopped, lost = finished(tmp_path / "done"), finished(tmp_path / "stopped", "stopped"), tmp_path / "lost"
    (finished(lost) / "best.pt").unlink()
    damaged = finished(tmp_path / "hurt") / "best.pt"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    own = done / "checkpoints/step_by_step_notes"
    own.mkdir()
    (own / "n.txt").write_text("mine")
    (done / "notes.txt").write_text("mine")
    with lock_folder(finished(tmp_path / "work")):
        before = content(tmp_path)
        assert main_multi_gpu.run(["clean", str(tmp_path)]) == 0
        shown = capsys.readouterr().out
        assert content(tmp_path) == before
        assert main_multi_gpu.run(["clean", str(tmp_path), "--yes"]) == 0
        after = content(tmp_path)
    size = sum(len(data) for name, data in before.items() if name.startswith("done/checkpoints/step_0"))
    text = f"2 checkpoints, {size / 2**10:.2f} KiB"
    assert f"{done}     {text}\n" in shown
    assert f"nothing was removed; --yes removes {text} of 1 run, and leaves best.pt and last.pt" in shown
    assert f"{tmp_path}/work     left alone: at work\n" in shown
    assert f"{stopped}  left alone: not completed" in shown
    assert f"{lost}     left alone: best.pt is missing or damaged" in shown
    assert f"{damaged.parent}     left alone: best.pt is missing or damaged" in shown
    gone = {name for name in before if name.startswith("done/checkpoints/step_0")}
    assert {name: data for name, data in before.items() if name not in gone} == {
        name: data for name, data in after.items() if name != "done/.lock"
    }
    assert f"removed: {text} of 1 run; best.pt and last.pt stay\n" in capsys.readouterr().out
    assert main_multi_gpu.run(["clean", str(done), "--json"]) == 0
    (again,) = json.loads(capsys.readouterr().out)
    assert again == {"run": str(done), "checkpoints": [], "bytes": 0, "reason": "", "removed": False}


def test_what_checkpoints_share_counts_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished(tmp_path / "a")
    one, other = (run / f"checkpoints/step_000000{step}/best_weights.pt" for step in (10, 20))
    one.write_bytes(b"w" * 10**6)
    other.hardlink_to(one)
    assert main_multi_gpu.run(["clean", str(run), "--yes", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (len(found["checkpoints"]), found["removed"]) == (2, True)
    assert 10**6 < found["bytes"] < 1.1 * 10**6


def test_a_link_in_one_of_several_runs_keeps_all_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        finished(tmp_path / name)
    (tmp_path / "b/checkpoints/step_00000030").symlink_to(finished(tmp_path.parent / f"{tmp_path.name} elsewhere"))
    before = content(tmp_path)
    assert main_multi_gpu.run(["clean", str(tmp_path), "--yes"]) == 2
    assert f"{tmp_path}/b/checkpoints/step_00000030 is a symbolic link" in capsys.readouterr().err
    assert content(tmp_path) == before


def test_a_cleaned_run_serves_its_weights_and_does_not_begin_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command would otherwise train it from the beginning, over its best weights."""
    run = tmp_path / "run"
    assert run_training(epochs=2, save_dir=str(run)).summary["status"] == "completed"
    assert main_multi_gpu.run(["clean", str(run), "--yes"]) == 0
    assert list((run / "checkpoints").iterdir()) == []
    before = content(run)
    again = run_training(epochs=2, save_dir=str(run))
    assert again.kind == "RequestError"
    assert f"{run} is complete, and its checkpoints were removed" in again.error
    assert f"--init-from {run}/best.pt" in again.error
    assert content(run) == before
    assert main_multi_gpu.run(["evaluate", str(run), "--own-code", "--json", "--nproc-per-node", "1"]) == 0
    assert "loss" in capsys.readouterr().out


def test_there_must_be_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_multi_gpu.run(["clean", str(tmp_path)]) == 2
    assert "has no run" in capsys.readouterr().err


def test_checkpoints_does_not_wait_for_a_fifo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_folder(tmp_path / "run", [])
    os.mkfifo(run / "last.pt")
    assert main_multi_gpu.run(["checkpoints", str(run)]) == 1  # damage
    assert "last.pt is not a torch.save file" in capsys.readouterr().out
