"""Out of memory in each part of a run on a simulated GPU: it goes on, or begins again, to the same end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # seconds, once rather than in each forked rank

from multigpu_cli import engine
from multigpu_cli.monitor import journal
from multigpu_cli.run import batch_size
from multigpu_cli.tasks.base import Task
from tests.gpu.simulated.gpus import train_on_gpus
from tests.gpu.simulated.install import Simulated

NO_DROPOUT = ("model.args.width=8", "model.args.dropout=0.0")  # whose noise depends on the micro-batch
RUN: dict[str, Any] = {
    "model": "mlp",
    "sets": NO_DROPOUT,
    "max_steps": 6,  # memory is short in the fifth; the sixth shows where that led
    "lr": 0.01,
    "schedule": "constant",
    "warmup_epochs": 0,
    "batch_size": 8,
    "checkpoint_every": 4,
    "log_interval": 1,
    "amp": "off",
    "keep": 20,
}


def exhaust_memory_at(place: str, rank: int = 0) -> Callable[[Simulated], None]:
    """In this process the next allocation has no room, once, when the run comes to that place."""

    def prepare(sim: Simulated) -> None:
        left = [rank]

        def fail(run: Any) -> None:
            if left and run.world.rank == left[0]:
                left.clear()
                sim.device.fail_allocation(run.world.local_rank, 0, 1)

        if place in ("trial", "evaluation"):
            owner, name = (batch_size, "_run_micro_batch") if place == "trial" else (Task, "evaluate")
            _before(owner, name, lambda *given: fail(given[0] if place == "trial" else _Place(given[3])))
        else:
            _before(
                engine, "train_step", lambda run, layout, _: _in_step(run, place, fail) if layout.step == 4 else None
            )

    return prepare


class _Place:
    def __init__(self, world: Any) -> None:
        self.world = world


def _before(owner: Any, name: str, look: Callable[..., object]) -> None:
    real = getattr(owner, name)

    def wrapped(*given: Any, **named: Any) -> Any:
        look(*given)
        return real(*given, **named)

    setattr(owner, name, wrapped)


def _in_step(run: Any, place: str, fail: Callable[[Any], object]) -> None:
    if place == "forward":
        run.state.model.register_forward_pre_hook(lambda *_: fail(run))
    elif place == "after the optimizer":
        _before(run.observer.nonfinite, "record", lambda *_: (fail(run), torch.empty(8, device=run.world.device)))
    else:
        _before(
            run.state.precision, {"backward": "backward", "optimizer": "clip_and_step"}[place], lambda *_: fail(run)
        )


def losses(run: Path) -> dict[int, float]:
    """The loss of each step, the last line of a step counts."""
    return {
        event["step"]: event["loss"]
        for event in journal.read_events(run / "journal.jsonl")
        if event["event"] == "train"
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    assert not train_on_gpus(multi_gpu="none", save_dir=str(run), **RUN).error
    return losses(run)


@pytest.mark.parametrize(
    ("place", "amp"),
    [
        *((place, "off") for place in ("forward", "backward", "optimizer", "after the optimizer")),
        *((place, "fp16") for place in ("backward", "optimizer")),
        *(pytest.param(place, "fp16", marks=pytest.mark.slow) for place in ("forward", "after the optimizer")),
    ],
)
def test_a_step_without_memory_is_taken_again_or_the_run_begins_again(
    place: str, amp: str, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    """Once the optimizer may have moved some of the weights, only the last checkpoint is whole."""
    run = RUN | {"save_dir": str(tmp_path / "run"), "amp": amp}
    first = train_on_gpus(multi_gpu="none", prepare=exhaust_memory_at(place), **run)
    if "optimizer" in place:
        assert first.kind == "TrainingError", first.error
        assert "out of memory in the optimizer at step 4" in first.error
        assert "the same command again" in first.error
        first = train_on_gpus(multi_gpu="none", **run)
    assert not first.error, first.error
    assert [fault["kind"] for fault in first.summary["faults"]] == ["out of memory"]
    assert losses(tmp_path / "run") == pytest.approx(undisturbed, rel=1e-4 if amp == "off" else 2e-2)


@pytest.mark.parametrize("place", ["trial", "evaluation"])
def test_what_needs_too_much_beside_the_steps_is_halved(
    place: str, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    ended = train_on_gpus(multi_gpu="none", prepare=exhaust_memory_at(place), save_dir=str(tmp_path / "run"), **RUN)
    assert not ended.error, ended.error
    assert [fault["kind"] for fault in ended.summary["faults"]] == ["out of memory"]
    assert losses(tmp_path / "run") == pytest.approx(undisturbed, rel=1e-4)


def test_a_rank_without_memory_before_the_first_step_lets_all_sharded_ranks_halve(
    undisturbed: dict[int, float], tmp_path: Path
) -> None:
    run = RUN | {"save_dir": str(tmp_path / "run"), "batch_size": 4, "global_batch_size": 8, "multi_gpu": "fsdp"}
    ended = train_on_gpus(2, prepare=exhaust_memory_at("trial", rank=1), **run)
    assert not ended.error, ended.error
    assert [fault["action"][:46] for fault in ended.summary["faults"]] == [
        "out of memory: micro-batches of 2 instead of 4"
    ]
    assert losses(tmp_path / "run") == pytest.approx(undisturbed, rel=1e-4)


@pytest.mark.parametrize(
    ("place", "mode"),
    [("backward", "ddp"), pytest.param("optimizer", "ddp", marks=pytest.mark.slow), ("backward", "fsdp")],
)
def test_a_rank_without_memory_ends_all_and_the_same_command_goes_on(
    place: str, mode: str, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    run = RUN | {"save_dir": str(tmp_path / "run"), "batch_size": 4, "global_batch_size": 8, "multi_gpu": mode}
    first = train_on_gpus(2, prepare=exhaust_memory_at(place, rank=1), **run)
    assert "rank 1 ran out of memory" in first.error
    again = train_on_gpus(2, **run)
    assert not again.error, again.error
    assert losses(tmp_path / "run") == pytest.approx(undisturbed, rel=1e-4)
