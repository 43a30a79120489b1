"""The sum of it: what a start costs until its first step does not grow with the data, nor with the runs before it."""

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from multigpu_cli import engine
from multigpu_cli.checkpoint import manifest, store
from multigpu_cli.checkpoint.run_folder import write_summary
from tests.support.run_training import run_training

STATUS = Path("/proc/self/status")


class Cheap(Dataset[tuple[Tensor, int]]):
    """Samples that cost nothing, as many as are asked for."""

    num_classes = 3

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((6,), float(index % 7)), index % 3


def cheap(split: str, train: int = 10_000) -> Cheap:
    return Cheap({"train": train, "val": 30, "test": 30}[split])


ONE_MORE_BATCH = 1_000
"""Calls to fetch a batch. --num-workers auto fetches batches for some milliseconds, so one start may fetch one more."""


def start(folder: Path, monkeypatch: pytest.MonkeyPatch, samples: int, **flags: Any) -> tuple[Counter[str], int]:
    """Functions called up to the first step, and the bytes of memory that were used for it at most."""
    calls, begun, result = Counter[str](), 0, folder / "start.json"

    def count(frame: Any, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and "/multigpu_cli/" in file:
            calls[f"{file}:{frame.f_code.co_name}"] += 1

    def read(name: str) -> int:
        return int(STATUS.read_text().partition(f"{name}:")[2].split()[0]) * 1024

    def begin() -> None:
        nonlocal begun
        Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
        begun = read("VmRSS")
        sys.setprofile(count)

    def end(*_: Any) -> None:
        sys.setprofile(None)
        result.write_text(json.dumps([calls, read("VmHWM") - begun]))
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "train_step", end)
    result.unlink(missing_ok=True)
    run_training(
        data=f"{__name__}:cheap",
        sets=[f"data.args.train={samples}"],
        batch_size=32,
        max_steps=2,
        prepare=begin,
        **flags,
    )
    calls, memory = json.loads(result.read_text())
    return Counter(calls), memory


def test_a_start_does_not_grow_with_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(tmp_path, monkeypatch, 10_000, save_dir=str(tmp_path / "first"))
    calls, memory = start(tmp_path, monkeypatch, 10_000, save_dir=str(tmp_path / "small"))
    more_calls, more_memory = start(tmp_path, monkeypatch, 3_000_000, save_dir=str(tmp_path / "large"))
    assert (more := more_calls - calls).total() < 200 + ONE_MORE_BATCH, more.most_common(9)
    assert more_memory - memory < 60e6


def test_a_start_does_not_read_the_finished_runs_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    start(tmp_path, monkeypatch, 10_000)
    calls, memory = start(tmp_path, monkeypatch, 10_000)
    home = next((tmp_path / "checkpoints").iterdir())
    for at in range(200):
        run = home / f"20250101-000000-{at:04}"
        (run / "checkpoints").mkdir(parents=True)
        (run / "config.yaml").touch()
        write_summary(run, json.dumps({"status": "completed"}))
        store.Store(run / "checkpoints", 1).save(1, {"weights": torch.zeros(1000)}, {"settings": {}})
        os.utime(run)

    def refuse(file: Path, *_: Any) -> str:
        raise AssertionError(f"{file} was read")

    monkeypatch.setattr(manifest, "compute_sha256", refuse)
    more_calls, more_memory = start(tmp_path, monkeypatch, 10_000)
    assert (more := more_calls - calls).total() < 10 * 200 + ONE_MORE_BATCH, (
        "a look at each summary",
        more.most_common(9),
    )
    assert more_memory - memory < 60e6
