"""What same_runs.py compares: each thing that a refactoring must not change is seen, what was measured is not."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.quality.same_runs import ABSENT, ROOT, cut, differences, read_run

Event = dict[str, Any]
START: Event = {"event": "start", "time": 1.5, "host": "here", "plan": {"strategy": "ddp", "save_dir": "run"}}
TRAIN: list[Event] = [
    {"event": "train", "step": step, "loss": 0.1 * step, "step_ms": 3.0, "comm_share": 0.1} for step in (1, 2)
]
EVAL: Event = {"event": "eval", "step": 2, "split": "val", "auroc": float("nan")}
SAVED: Event = {"event": "checkpoint", "step": 1, "seconds": 0.1, "bytes": 9}


def write(folder: Path, events: list[Event], weights: dict[str, Any], summary: dict[str, Any] | None = None) -> None:
    """A small run folder, the first of its checkpoints complete."""
    run = folder / "run"
    for step in (1, 2):
        checkpoint = run / "checkpoints" / f"step_{step:08}"
        checkpoint.mkdir(parents=True, exist_ok=True)
        torch.save(weights | {"progress": {"step": step, "train_seconds": 0.3}}, checkpoint / "state.pt")
    (run / "journal.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    told = {"status": "completed", "fingerprint": "ab", "step_ms": {"p50": 1.0}, "save_dir": str(folder / "run")}
    (run / "summary.json").write_text(json.dumps(told | (summary or {})))
    (run / "config.yaml").write_text("lr: 0.1\n")


def compared(
    tmp_path: Path,
    events: list[Event],
    weights: dict[str, Any],
    more: Callable[[Path], object] | None = None,
    **summary: Any,
) -> list[tuple[str, Any, Any]]:
    """Where this run differs from the usual one."""
    write(tmp_path / "old", [START, *TRAIN, EVAL, SAVED], {"model": {"w": torch.ones(2)}})
    write(tmp_path / "new", events, weights, summary)
    if more:
        more(tmp_path / "new")
    return [*differences(read_run(tmp_path / "old"), read_run(tmp_path / "new"))]


def test_what_was_measured_and_where_it_ran_is_no_difference(tmp_path):
    events = [START | {"time": 9.0, "host": "there"}, TRAIN[0] | {"step_ms": 1.0}, SAVED | {"bytes": 8}, TRAIN[1], EVAL]
    weights = {"model": {"w": torch.ones(2)}}
    assert compared(tmp_path, events, weights, step_ms={"p50": 2.0}, peak_memory_bytes=[1]) == []


@pytest.mark.parametrize(
    ("events", "place", "old", "new"),
    [
        ([START, TRAIN[0], TRAIN[1] | {"loss": 0.2 + 2e-16}, EVAL, SAVED], "journal[2].loss", 0.2, 0.2 + 2e-16),
        ([START, TRAIN[0], {"event": "train", "step": 2}, EVAL, SAVED], "journal[2].loss", 0.2, ABSENT),
        ([START, *TRAIN, EVAL | {"kappa": 1}, SAVED], "journal[3].kappa", ABSENT, 1),
        ([START, TRAIN[0], EVAL, TRAIN[1], SAVED], "journal[2].event", "train", "eval"),
        ([START, *TRAIN, SAVED], "journal[3]", {key: EVAL[key] for key in EVAL}, ABSENT),
        ([START, *TRAIN, EVAL, SAVED | {"step": 2}], "beside[0].step", 1, 2),
        ([START | {"plan": {"strategy": "dp"}}, *TRAIN, EVAL, SAVED], "journal[0].plan.strategy", "ddp", "dp"),
        ([START, TRAIN[0] | {"step": 1.0}, TRAIN[1], EVAL, SAVED], "journal[1].step", 1, 1.0),
    ],
)  # fmt: skip
def test_a_change_in_the_journal_is_named(tmp_path, events, place, old, new):
    found = compared(tmp_path, events, {"model": {"w": torch.ones(2)}})[0]
    assert (found[0], repr(found[1]), repr(found[2])) == (place, repr(old), repr(new))


@pytest.mark.parametrize(
    ("weights", "more", "place"),
    [
        (torch.tensor([1, 1 + 2**-23]), None, "checkpoints/step_00000001/state.pt.model.w"),
        (torch.ones(2, 1), None, "checkpoints/step_00000001/state.pt.model.w"),
        (torch.ones(2).double(), None, "checkpoints/step_00000001/state.pt.model.w"),
        (torch.ones(2), lambda folder: (folder / "run" / "new.txt").touch(), "files[7]"),
        (torch.ones(2), lambda folder: (folder / "notes.txt").write_text("a\n"), "notes.txt"),
        (torch.ones(2), lambda folder: (folder / "run" / "config.yaml").write_text("lr: 0.2\n"), "config.lr"),
    ],
)
def test_a_change_in_weights_and_files_is_named(tmp_path, weights, more, place):
    assert compared(tmp_path, [START, *TRAIN, EVAL, SAVED], {"model": {"w": weights}}, more)[0][0] == place


def test_another_fingerprint_comes_first(tmp_path):
    found = compared(tmp_path, [START, *TRAIN, EVAL, SAVED], {}, fingerprint="cd", status="failed")
    assert [place for place, _, _ in found[:3]] == ["fingerprint", "summary.status", "summary.fingerprint"]


def test_a_run_is_cut_after_its_first_checkpoint(tmp_path):
    write(tmp_path / "old", [START, TRAIN[0], SAVED, TRAIN[1], EVAL, SAVED | {"step": 2}], {})
    cut(tmp_path / "old", tmp_path / "cut")
    left = sorted(file.name for file in (tmp_path / "cut" / "run").rglob("*") if file.is_file())
    assert left == ["config.yaml", "journal.jsonl", "state.pt"]
    assert (tmp_path / "cut" / "run" / "checkpoints" / "step_00000001" / "state.pt").exists()
    journal = (tmp_path / "cut" / "run" / "journal.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in journal] == ["start", "train", "checkpoint"]


@pytest.mark.slow
def test_the_same_code_makes_the_same_runs_and_other_code_is_found_out(tmp_path):
    """On a copy, which then anneals the learning rate a little otherwise."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "multigpu_cli", copy / "multigpu_cli")
    shutil.copy(ROOT / "main_multi_gpu.py", copy)
    git = ["git", "-C", str(copy), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "copy"]):
        subprocess.run([*git, *words], check=True)
    command = [sys.executable, "-m", "tests.quality.same_runs", str(copy), "--only", "dp"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (0, "1 of 1 kinds are the same"), ended.stdout
    [file] = [file for file in copy.glob("multigpu_cli/**/*.py") if "cos(pi * " in file.read_text()]
    file.write_text(file.read_text().replace("cos(pi * ", "cos(3 * "))
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "resumed by the new code, as if never stopped" in ended.stdout  # what is shown is the first difference
