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
    base, counts = 0, {"step": [0], "best": [0]}
    step, capture_best, submit = Precision.clip_and_step, Saver.capture_best, Writer.submit

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

    def write_at_once(writer: Writer, copy: Any, job: Any) -> None:
        submit(writer, copy, job)
        wait([writer._job])  # type: ignore[list-item]

    def note_counts(*_: Any) -> None:
        (tmp_path / "counts.json").write_text(json.dumps({name: max(each) for name, each in counts.items()}))

    monkeypatch.setattr(engine, "gc", Mock())  # what is frozen is not found
    monkeypatch.setattr(Precision, "clip_and_step", count_in_step)
    monkeypatch.setattr(Saver, "capture_best", count_best)
    monkeypatch.setattr(Writer, "submit", write_at_once)
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
    part = 4 * 600 * 600
    found = json.loads((tmp_path / "counts.json").read_text())
    evals = [event for event in read_events(tmp_path / "run/journal.jsonl") if event["event"] == "eval"]
    assert len({event["loss"] for event in evals}) > 8
    assert 7.5 * part < found["step"] < 8.5 * part
    assert 6.5 * part < found["best"] < 8.5 * part
