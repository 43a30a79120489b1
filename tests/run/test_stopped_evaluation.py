"""A run that a signal, a kill or an error ends in an evaluation loses no step; its resume makes the evaluation once."""

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from multigpu_cli.checkpoint.store import Store
from multigpu_cli.monitor import journal
from tests.support.interrupted_evaluation import strike, terminate_self
from tests.support.run_training import run_training
from tests.support.wait_until import wait_until

pytestmark = pytest.mark.usefixtures("in_tmp_path")
SHORT: dict[str, Any] = {"global_batch_size": 20, "batch_size": 2, "epochs": 3, "log_interval": 1, "exact": True}
STEPS = 3  # of an epoch


class Calls:
    """A hook that counts its calls, in its state and in a file."""

    def __init__(self) -> None:
        self.calls = 0

    def evaluated(self, numbers: Any) -> None:
        self._note(f"evaluated {numbers.split} {numbers.step}")

    def epoch_end(self, numbers: Any) -> None:
        self._note(f"epoch_end {numbers.step}")

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]

    def _note(self, text: str) -> None:
        self.calls += 1
        with open("calls.txt", "a") as file:
            file.write(f"{self.calls} {text}\n")


def die_once_saved(steps: int) -> None:
    """After the thread that writes the checkpoint, as in an evaluation that takes its time."""
    wait_until(lambda: Path(f"run/checkpoints/step_{steps:08d}").exists(), "the checkpoint is written")
    os.kill(os.getpid(), signal.SIGKILL)


def spoil(steps: int = 0) -> None:
    raise OSError("image file is truncated")


def evals(folder: str) -> list[tuple[Any, ...]]:
    lines = [line for line in journal.read_events(f"{folder}/journal.jsonl") if line["event"] == "eval"]
    return [tuple(value for key, value in line.items() if key != "time") for line in lines]


def train_lines(folder: str) -> dict[int, Any]:
    lines = [line for line in journal.read_events(f"{folder}/journal.jsonl") if line["event"] == "train"]
    return {line["step"]: (line["loss"], line["lr"], line["samples"]) for line in lines}


def newest_step(folder: str) -> int:
    newest, _ = Store(Path(folder, "checkpoints")).find_newest()
    assert newest
    return newest.step


def assert_same(summary: dict[str, Any], undisturbed: dict[str, Any], folder: str = "run") -> None:
    """The run has ended as the undisturbed one, and each evaluation stands once in its journal."""
    for key in ("status", "fingerprint", "best", "steps", "samples"):
        assert summary[key] == undisturbed[key], key
    assert summary["final"] == pytest.approx(undisturbed["final"], rel=0, abs=0)
    assert evals(folder) == evals("whole")
    assert train_lines(folder) == train_lines("whole")


@pytest.mark.parametrize(
    ("workers", "flags"),
    [
        (1, {}),
        (2, {"multi_gpu": "ddp", "ema": 0.9, "early_stopping_patience": 1}),
        (2, {"multi_gpu": "fsdp"}),
        (2, {"multi_gpu": "ddp", "checkpoint_every": "1000", "batch_size": 4}),
        (1, {"optimizer": "tests.support.optimizers:ScheduleFreeSGD", "lr": 0.01}),
    ],
    ids=["one", "ddp", "fsdp", "rare checkpoints", "schedule-free"],
)
def test_evaluation_is_left_at_a_signal_and_made_once(workers: int, flags: dict[str, Any]) -> None:
    """The signal reaches one rank; with batches of 4 the ranks have one and two batches."""
    flags = SHORT | flags
    whole = run_training(workers, **flags, save_dir="whole")
    assert whole.error == ""
    signalled = partial(strike, "val", 2, 0, terminate_self, workers - 1)
    stopped = run_training(workers, **flags, save_dir="run", prepare=signalled)
    assert (stopped.error, stopped.summary["status"], stopped.summary["steps"]) == ("", "stopped", 2 * STEPS)
    assert newest_step("run") == 2 * STEPS
    assert [line[0:2] for line in evals("run")] == [("eval", 1)]
    ended = run_training(workers, **flags, save_dir="run")
    assert ended.error == ""
    assert_same(ended.summary, whole.summary)


@pytest.mark.parametrize("epoch", [2, 3])
@pytest.mark.parametrize("act", [die_once_saved, spoil], ids=["kill", "error"])
def test_crash_in_an_evaluation_loses_no_step(act: Callable[[int], None], epoch: int) -> None:
    whole = run_training(**SHORT, save_dir="whole")
    crash = partial(strike, "val", epoch, 2, partial(act, epoch * STEPS))
    crashed = run_training(**SHORT, save_dir="run", prepare=crash)
    assert crashed.killed or "image file is truncated" in crashed.error
    assert newest_step("run") == epoch * STEPS
    ended = run_training(**SHORT, save_dir="run")
    assert ended.summary["resumed_from"] == f"run/checkpoints/step_{epoch * STEPS:08d}"
    assert_same(ended.summary, whole.summary)


@pytest.mark.parametrize("act", [terminate_self, spoil], ids=["signal", "error"])
@pytest.mark.parametrize("workers", [1, 2])
def test_test_evaluation_is_left_and_repeated_alone(workers: int, act: Callable[[], None]) -> None:
    whole = run_training(workers, **SHORT, save_dir="whole")
    left = run_training(workers, **SHORT, save_dir="run", prepare=partial(strike, "test", 3, 1, act))
    assert json.loads(Path("run/summary.json").read_text())["status"] == ("failed" if left.error else "stopped")
    assert evals("run") == evals("whole")[:-1]
    assert_same(run_training(workers, **SHORT, save_dir="run").summary, whole.summary)


def test_hooks_hear_of_an_interrupted_evaluation_once() -> None:
    flags = SHORT | {"hook": ["tests.run.test_stopped_evaluation:Calls"]}
    run_training(**flags, save_dir="whole")
    told = Path("calls.txt").read_text()
    Path("calls.txt").unlink()
    run_training(**flags, save_dir="run", prepare=partial(strike, "val", 2, 1, terminate_self))
    run_training(**flags, save_dir="run", prepare=partial(strike, "test", 3, 1, terminate_self))
    run_training(**flags, save_dir="run")
    assert Path("calls.txt").read_text() == told


def test_crash_after_an_evaluation_keeps_its_result() -> None:
    """The checkpoint that was written before the evaluation has the result after it, also what a hook made of it."""
    flags = SHORT | {"hook": ["tests.run.test_stopped_evaluation:Calls"], "early_stopping_patience": 3}
    whole = run_training(**flags, save_dir="whole")
    told = Path("calls.txt").read_text()
    Path("calls.txt").unlink()
    deed = {"OWN_DEED": f"0:{10 * 5 + 2}:SIGKILL", "OWN_AFTER": "run/checkpoints/step_00000003/evaluation.pt"}
    assert run_training(**flags, save_dir="run", environ=deed).killed == [0]
    assert evals("run") == evals("whole")[:1]
    ended = run_training(**flags, save_dir="run")
    assert_same(ended.summary, whole.summary)
    assert Path("calls.txt").read_text() == told


def test_signal_before_the_last_evaluation_leaves_it_for_the_resume() -> None:
    whole = run_training(**SHORT, save_dir="whole")
    # of 30 passes in each epoch, and one in the rehearsal
    stopped = run_training(**SHORT, save_dir="run", environ={"OWN_DEED": "0:91:SIGTERM"})
    assert (stopped.summary["status"], stopped.summary["steps"]) == ("stopped", 3 * STEPS)
    assert len(evals("run")) == 2
    assert_same(run_training(**SHORT, save_dir="run").summary, whole.summary)
