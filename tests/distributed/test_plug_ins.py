"""A user's own dataset, model and task from a file in the working directory, trained as a user would."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.run_training import Ended, run_training

MINE = '''
import random
import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, IterableDataset

class Words(Dataset):
    """Ragged: each sample is as many numbers as it likes, with noise from three generators; a dict, of NumPy arrays."""
    classes = ["few", "many"]

    def __init__(self, split, size=40):
        self.length = np.random.default_rng(len(split)).integers(1, 9, size)

    def __len__(self):
        return len(self.length)

    def __getitem__(self, index):
        count = self.length[index]
        noise = np.random.rand(count) + random.random() + torch.rand(1).item()
        return {"x": noise + 1, "label": int(count > 4)}

    def collate_fn(self, samples):
        rows = [torch.from_numpy(sample["x"]).float() for sample in samples]
        length = torch.tensor([len(row) for row in rows])
        inputs = {"padded": pad_sequence(rows, batch_first=True), "length": length}
        return inputs, torch.tensor([sample["label"] for sample in samples])

class Reader(nn.Module):
    def __init__(self, num_classes, width=8):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, num_classes))

    def forward(self, inputs):
        sums = inputs["padded"].sum(1)
        return self.net(torch.stack([sums, inputs["length"].float()], 1))

class Pairs(Dataset):
    """Several inputs by name, and labels of which any number is right."""

    def __init__(self, split):
        self.rng = np.random.default_rng(len(split)).normal(size=(40, 6))

    def __len__(self):
        return 40

    def __getitem__(self, index):
        row = self.rng[index]
        return {"left": row[:3], "right": row[3:], "target": (row[:4] > 0).astype(np.float32)}

class Stream(IterableDataset):
    def __init__(self, split):
        self.split = split

    def __iter__(self):
        for at in range(40):
            inputs = torch.randn(3)
            yield inputs, inputs.sum(0, keepdim=True)

class Both(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.net = nn.Linear(6, 4)

    def forward(self, inputs):
        return self.net(torch.cat([inputs["left"], inputs["right"]], 1))

def line(input_shape):
    return nn.Linear(input_shape[0], 1)

def wide(input_shape):
    return nn.Linear(input_shape[0], 3)

def narrow(num_classes):
    return nn.Linear(5, num_classes)

def fails():
    raise OSError("no such sensor")
'''
WATCHING = """
import json
import os

def lead(outputs, targets):
    return outputs.max(1).values - outputs.min(1).values

class Last:
    def update(self, outputs, targets): self.seen = outputs[-1, 0]
    def compute(self): return self.seen

class Norms:
    ranks = "all"
    def start(self, numbers):
        self.squares = {"weights": [], "gradients": [], "names": []}
    def after_backward(self, numbers, tensors):
        self.squares["names"] = sorted(tensors)
        self.squares["gradients"].append(sum(float(each.double().square().sum()) for each in tensors.values()))
    def step_end(self, numbers, tensors):
        self.squares["weights"].append(sum(float(each.double().square().sum()) for each in tensors.values()))
    def end(self, numbers):
        with open(f"{os.path.basename(numbers.folder)}-{numbers.rank}.json", "w") as file:
            json.dump(self.squares, file)
"""
RUN: dict[str, Any] = {"global_batch_size": 16, "batch_size": 3, "epochs": 2, "num_workers": 0, "log_interval": 1}
WAYS = {
    "ragged": {"data": "mine_here:Words", "model": "mine_here:Reader"},
    "labels": {"data": "mine_here:Pairs", "model": "mine_here:Both", "task": "multi-label"},
    "stream": {"data": "mine_here:Stream", "model": "mine_here:line", "task": "regression"},
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "mine_here.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("mine_here", None)


def run(workers: int, way: str, **flags: Any) -> Ended:
    ended = run_training(workers, **RUN | WAYS[way] | {"save_dir": f"{way}{workers}"} | flags)
    assert not ended.error, ended.error
    return ended


@pytest.mark.parametrize("way", WAYS)
def test_the_number_of_workers_changes_no_bit(way: str) -> None:
    ends = [run(workers, way, exact=True).summary for workers in (1, 2, 3)]
    assert len({end["fingerprint"] for end in ends}) == 1
    assert len({str(end["final"]) for end in ends}) == 1
    assert ends[0]["steps"] == 6


def test_loader_processes_change_no_bit() -> None:
    here, there = (run(1, "ragged", num_workers=count, save_dir=f"{count}").summary for count in (0, 1))
    assert here["fingerprint"] == there["fingerprint"]


def test_a_first_batch_that_does_not_fit_is_told_in_one_screen() -> None:
    ended = run_training(2, **RUN | WAYS["ragged"] | {"model": "mine_here:narrow", "save_dir": "x"})
    assert ended.kind == "RequestError"
    lines = ended.error.splitlines()
    assert len(lines) < 12
    for said in (
        "--model mine_here:narrow does not take the first batch of --data mine_here:Words",
        "TypeError in ",
        "built for input_shape=(), num_classes=2",
        "{padded: float32 (2, ",
        "length: int64 (2,)}",
        "nothing: it failed itself",
        "the targets are     int64 (2,)",
        "outputs (n, classes) logits",
    ):
        assert said in ended.error
    assert not Path("x").exists()


def test_outputs_that_the_task_does_not_take_are_shown() -> None:
    ended = run_training(1, **RUN | WAYS["stream"] | {"model": "mine_here:wide"})
    assert "outputs (2, 3) for targets (2, 1)" in ended.error
    assert "it returned         float32 (2, 3)" in ended.error
    ended = run_training(1, **RUN | WAYS["labels"] | {"task": "language-model"})
    assert "vocabulary of 0 tokens" in ended.error


def test_a_factory_that_raises_is_told_with_its_place() -> None:
    ended = run_training(1, **RUN | WAYS["ragged"] | {"data": "mine_here:fails"})
    assert "data: mine_here:fails raised OSError in mine_here.py:" in ended.error
    assert "no such sensor" in ended.error


def test_ranks_that_see_different_data_are_told_apart() -> None:
    Path("mine_here.py").write_text(
        MINE + "\nimport os\ndef unlike(split):\n    return Words(split, 40 + int(os.environ.get('RANK', 0)))\n"
    )
    ended = run_training(2, **RUN | WAYS["ragged"] | {"data": "mine_here:unlike"})
    assert "rank 1 and the others see different data: 41 training samples instead of 40" in ended.error


def test_hooks_and_metrics_see_a_sharded_run_as_one_worker_does() -> None:
    """Metrics with the same bits; of the weights and gradients each rank its rows, and together all of them."""
    Path("watching.py").write_text(WATCHING)
    more: dict[str, Any] = {
        "metric": ["watching:lead", "macro_f1", "watching:Last"],
        "hook": ["watching:Norms"],
        "exact": True,
    }
    runs: dict[str, Any] = {"alone": (1, {}), "sharded": (2, {"multi_gpu": "fsdp"})}
    ends = {
        name: run_training(workers, epochs=2, batch_size=10, global_batch_size=20, save_dir=name, **more, **way)
        for name, (workers, way) in runs.items()
    }
    assert [end.error for end in ends.values()] == ["", ""]
    alone, sharded = (end.summary for end in ends.values())
    assert alone["final"] == sharded["final"]
    assert {"val_lead", "test_macro_f1", "test_last"} <= alone["final"].keys()
    parts = [json.loads(Path(f"{name}.json").read_text()) for name in ("alone-0", "sharded-0", "sharded-1")]
    assert parts[0]["names"] == parts[1]["names"]
    for what in ("weights", "gradients"):
        whole, *rows = (torch.tensor(part[what]) for part in parts)
        assert len(whole) == 6
        assert torch.allclose(whole, rows[0] + rows[1], rtol=1e-5)
