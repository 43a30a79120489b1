"""--compile with --grad-checkpointing: the same training as without both, in one process and in several."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from multigpu_cli.checkpoint.weights import read_weights
from multigpu_cli.monitor.journal import read_events
from tests.support.run_training import run_training

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch hides it, unless it is an error

HERE = "tests.distributed.test_compiled_checkpointing"
CASE: dict[str, Any] = {"optimizer": "sgd", "lr": 0.1, "batch_size": 8, "global_batch_size": 16, "epochs": 2}


def make_blocks(normalize: Callable[[], nn.Module]) -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(16, 16), normalize(), nn.Tanh()) for _ in range(3)]
    ends = nn.Linear(6, 16), nn.Linear(16, 3)
    return nn.Sequential(ends[0], *blocks, ends[1])


def without_buffers() -> nn.Module:
    return make_blocks(lambda: nn.LayerNorm(16))


def with_buffers() -> nn.Module:
    return make_blocks(lambda: nn.BatchNorm1d(16))


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def trace() -> None:
    """Have torch trace and differentiate as always, and generate no code, which takes seconds."""
    real = torch.compile
    torch.compile = lambda model, **options: real(model, **options | {"backend": "aot_eager"})  # type: ignore[assignment]


def generate() -> None:
    """Import torch's code generator, whose import warns, and have it work in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch._inductor.compile_fx
    torch._inductor.config.compile_threads = 1


def compare_runs(model: str, workers: int, prepare: Callable[[], object]) -> None:
    case = CASE | {"model": f"{HERE}:{model}"}
    for folder, flags in {
        "plain": {},
        "both": {"compile": "default", "grad_checkpointing": True, "prepare": prepare},
    }.items():
        ended = run_training(workers, **case, **flags, save_dir=folder)  # type: ignore[arg-type]
        assert not ended.error, ended.error
    assert "compile" in next(read_events(Path("both/journal.jsonl"))), "nothing was compiled"
    plain, both = (read_weights(Path(folder, "last.pt")) for folder in ("plain", "both"))
    torch.testing.assert_close(both, plain)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("model", ["without_buffers", "with_buffers"])
def test_compile_with_checkpointing_trains_as_without(model: str, workers: int) -> None:
    compare_runs(model, workers, trace)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("model", ["without_buffers", "with_buffers"])
def test_generated_code_with_checkpointing_trains_as_without(model: str, workers: int) -> None:
    compare_runs(model, workers, generate)


def test_reduce_overhead_refuses_checkpointed_blocks_with_buffers() -> None:
    ended = run_training(
        1, **CASE, model=f"{HERE}:with_buffers", compile="reduce-overhead", grad_checkpointing=True, save_dir="run"
    )
    assert (ended.kind, Path("run").exists()) == ("RequestError", False)
    assert ended.error.startswith("--compile reduce-overhead with --grad-checkpointing")
