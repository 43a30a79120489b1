"""Several simulated GPUs: an overflow on one of them, one without work, and how the work is shared out."""

from pathlib import Path
from typing import Any

import pytest
import torch

from multigpu_cli import engine
from multigpu_cli.monitor import journal
from multigpu_cli.runtime.precision import Precision
from multigpu_cli.strategies.base import DataParallel
from tests.gpu.simulated.gpus import alone, train_on_gpus
from tests.gpu.simulated.install import Simulated
from tests.gpu.simulated.machine import Machine

RUN: dict[str, Any] = {"max_steps": 6, "checkpoint_every": 2, "log_interval": 1, "global_batch_size": 16}
NO_DROPOUT: dict[str, Any] = {"model": "mlp", "sets": ("model.args.width=8", "model.args.dropout=0.0"), "amp": "off"}


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in journal.read_events(run / "journal.jsonl") if event["event"] == "train"]


def overflowing(sim: Simulated) -> None:
    """Rank 1's gradient of the fifth step is infinite."""
    real = engine.train_step

    def step(run: Any, layout: Any, work: Any) -> Any:
        if layout.step == 4 and run.world.rank == 1:
            hook = run.strategy.local_parameters[0].register_hook(
                lambda gradient: torch.full_like(gradient, float("inf"))
            )
            try:
                return real(run, layout, work)
            finally:
                hook.remove()
        return real(run, layout, work)

    engine.train_step = step


def test_an_fp16_overflow_on_one_rank_is_a_skipped_step_on_all(tmp_path: Path) -> None:
    """Each checkpoint compares the replicas."""
    run = RUN | NO_DROPOUT | {"amp": "fp16", "batch_size": 8}
    ended = train_on_gpus(2, prepare=overflowing, save_dir=str(tmp_path / "run"), **run)
    assert not ended.error, ended.error
    (fault,) = ended.summary["faults"]
    assert fault["kind"] == "nonfinite"
    assert "1 step skipped" in fault["action"]
    assert "step 5" in fault["action"]


def test_a_gpu_without_work_changes_nothing(tmp_path: Path) -> None:
    """Two micro-batches for three workers."""
    run = RUN | {"batch_size": 8, "exact": True, "amp": "off", "max_steps": 3}
    three = train_on_gpus(3, machine=Machine.of(3), save_dir=str(tmp_path / "three"), **run)
    assert not three.error, three.error
    one = train_on_gpus(1, multi_gpu="none", save_dir=str(tmp_path / "one"), **run)
    assert three.summary["fingerprint"] == one.summary["fingerprint"] is not None


@pytest.mark.parametrize(("strategy", "ranks"), [("dp", 1), ("ddp", 2)])
def test_two_gpus_take_the_same_steps_as_one(strategy: str, ranks: int, tmp_path: Path) -> None:
    run = RUN | NO_DROPOUT | {"batch_size": 4}
    two = train_on_gpus(ranks, multi_gpu=strategy, save_dir=str(tmp_path / "two"), **run)
    assert not two.error, two.error
    assert (two.summary["strategy"], two.summary["devices"]) == (strategy, 2)
    one = train_on_gpus(1, multi_gpu="none", save_dir=str(tmp_path / "one"), **run)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    assert one.summary["final"]["test_loss"] == pytest.approx(two.summary["final"]["test_loss"], rel=1e-4)


@pytest.mark.parametrize(("amp", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16"), ("off", "float32")])
def test_every_replica_computes_in_the_format_of_the_run(amp: str, dtype: str) -> None:
    """DataParallel's threads know of autocast, and not of its format, which is fp16 there."""

    def work(sim: Simulated) -> list[tuple[str, str]]:
        gpus, seen = (torch.device("cuda", 0), torch.device("cuda", 1)), []
        model = torch.nn.Linear(4, 4).to(gpus[0])
        model.register_forward_hook(lambda _, given, made: seen.append((str(made.device), str(made.dtype))))
        strategy = DataParallel(model, gpus)
        for _ in range(2):
            with Precision(amp, gpus[0]).autocast():
                strategy.callable(torch.ones(4, 4, device=gpus[0])).float().sum().backward()
        assert model.weight.grad is not None
        return sorted(seen)

    assert alone(work) == [(f"cuda:{number}", f"torch.{dtype}") for number in (0, 0, 1, 1)]


def test_sync_batchnorm_takes_its_statistics_from_both_gpus(tmp_path: Path) -> None:
    """Two halves of a batch come to what the whole batch comes to on one."""
    run = RUN | {
        "model": "tests.support.oom_model:net",
        "sets": ("model.args.norm=true", "model.args.limit=1000"),
        "amp": "off",
    }
    flags = {"batch_size": 8, "sync_bn": True, "drop_last": True}
    two = train_on_gpus(2, save_dir=str(tmp_path / "two"), **run | flags)
    assert not two.error, two.error
    one = train_on_gpus(
        1, multi_gpu="none", save_dir=str(tmp_path / "one"), **run | {"batch_size": 16, "drop_last": True}
    )
    assert not one.error, one.error
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
