"""Whole runs with and without the guard: the same bits, and a refusal on every rank before anything is written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from multigpu_cli.data.loader import Batch
from multigpu_cli.tasks.supervised import Classification
from tests.support.run_training import run_training

SHORT: dict[str, Any] = {"data": "digits", "model": "convnet", "batch_size": 8, "global_batch_size": 32, "max_steps": 2}


@pytest.mark.parametrize("workers", [1, 2])
def test_exact_runs_have_equal_fingerprints_without_the_guard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.chdir(tmp_path)
    fingerprints = {
        run_training(workers, **SHORT | {"guard": guard, "save_dir": guard}, exact=True).summary["fingerprint"]
        for guard in ("on", "off")
    }
    assert len(fingerprints) == 1


def test_guard_refuses_a_run_on_every_rank_before_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = SHORT | {"data": "tests.support.user_code:tensors", "model": "tests.run.guard.test_first_batch:teacher"}
    ended = run_training(2, **flags, save_dir="run")
    assert ended.kind == "RequestError"
    assert "forward writes the parameters 1.teacher.weight" in ended.error
    assert not Path("run").exists()


def test_guard_refuses_code_that_communicates_on_several_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = SHORT | {"data": "tests.support.user_code:tensors", "model": "tests.run.guard.test_first_batch:gathering"}
    ended = run_training(2, **flags, save_dir="run")
    assert "communicates by itself: allreduce (planted_models.py:" in ended.error


def test_guard_refuses_losses_that_differ_between_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = SHORT | {"data": "tests.support.user_code:tensors", "model": "tests.run.guard.test_first_batch:by_rank"}
    ended = run_training(2, **flags, save_dir="run")
    assert "the same batch has a different loss on each rank (" in ended.error


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def encode(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.layer(inputs)
        return logits

    def forward(self, inputs: Tensor) -> Tensor:
        return self.encode(inputs)


class EncodingTask(Classification):
    """A task that calls a method of the model."""

    def loss_sum(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        return super().loss_sum(model.encode, batch)  # type: ignore[attr-defined]


def test_ddp_refuses_a_task_that_calls_methods_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = {
        "data": "tests.support.user_code:tensors",
        "model": f"{__name__}:Encoder",
        "task": f"{__name__}:EncodingTask",
    }
    ended = run_training(2, **SHORT | own, save_dir="run")
    assert ended.kind == "RequestError"
    assert "--task: uses model.encode, which DDP does not have" in ended.error
    assert not run_training(1, **SHORT | own, save_dir="alone").error
    assert not run_training(2, **SHORT | own, save_dir="exact", exact=True).error
