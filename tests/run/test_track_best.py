"""Which weights of a run are the best, and what memory they take."""

import gc
import json
from concurrent.futures import wait
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from multigpu_cli import engine
from multigpu_cli.checkpoint.snapshot import Writer
from multigpu_cli.monitor.journal import read_events
from multigpu_cli.run.finalize import finish_run
from multigpu_cli.runtime.precision import Precision
from multigpu_cli.strategies.base import Saver
from tests.support.run_training import run_training


@pytest.mark.parametrize("which", ["min", "max"])
def test_best_is_what_the_flag_says(which: str, tmp_path: Path) -> None:
    flags: dict[str, Any] = {
        "save_dir": str(tmp_path),
        "batch_size": 20,
        "epochs": 3,
        "lr": 0.01,
        "best": f"val_loss:{which}",
    }
    ended = run_training(1, **flags)
    events = [event for event in read_events(tmp_path / "journal.jsonl") if event["event"] == "eval"]
    losses = [event["loss"] for event in events if event["split"] == "val"]
    assert len(set(losses)) == 3
    assert ended.summary["best"]["val_loss"] == {"min": min, "max": max}[which](losses)


def count_bytes() -> int:
    """Bytes of all tensors in host memory, and of their gradients."""
    gc.collect()
    held = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and each.device.type == "cpu"]
    held += [each.grad for each in held if each.is_leaf and each.grad is not None]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in held}.values())


def test_a_run_holds_at_most_twice_what_its_state_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, gradients and AdamW's two moments are 4 parts; the checkpoint's copy 3, that of the best weights 1."""
    run_and_count_bytes(tmp_path, monkeypatch)
    part = 4 * 600 * 600
    counts = json.loads((tmp_path / "counts.json").read_text())
    evals = [event for event in read_events(tmp_path / "run/journal.jsonl") if event["event"] == "eval"]
    assert len({event["loss"] for event in evals}) > 8
    assert 6.5 * part < counts["step"] < 7.5 * part
    assert 6.5 * part < counts["best"] < 8.5 * part


def run_and_count_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train, and write to counts.json the most bytes held in a step and when the best weights have been copied."""
    base, counts = 0, {"step": [0], "best": [0]}
    step, capture_best, add = Precision.clip_and_step, Saver.capture_best, Writer.add

    def begin() -> None:
        nonlocal base
        base = count_bytes()

    def count_in_step(*args: Any) -> Any:
        counts["step"].append(count_bytes() - base)
        return step(*args)

    def count_best(*args: Any) -> dict[str, Any]:
        found = capture_best(*args)
        counts["best"].append(count_bytes() - base)
        return found

    def write_at_once(writer: Writer, job: Any) -> None:
        add(writer, job)
        wait(writer._jobs)

    def note_counts(*_: Any) -> None:
        (tmp_path / "counts.json").write_text(json.dumps({name: max(each) for name, each in counts.items()}))

    monkeypatch.setattr(engine, "gc", Mock())  # what is frozen is not found
    monkeypatch.setattr(Precision, "clip_and_step", count_in_step)
    monkeypatch.setattr(Saver, "capture_best", count_best)
    monkeypatch.setattr(Writer, "add", write_at_once)
    monkeypatch.setattr(engine, "finish_run", lambda run, status: note_counts() or finish_run(run, status))
    run_training(
        1,
        save_dir=str(tmp_path / "run"),
        batch_size=60,
        epochs=9,
        lr=0.001,
        best="val_loss:min",
        checkpoint_every="4",
        model="multigpu_cli.models.networks.mlp:build",
        sets=["model.args.width=600"],
        prepare=begin,
    )
