"""Evaluations and their best weights, and what a run leaves behind when something went wrong on the way."""

import io
import json
import re
import sys
import time
from errno import ENOSPC
from functools import partial
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch

from multigpu_cli.checkpoint import weights
from multigpu_cli.monitor import console, journal
from multigpu_cli.run import checkpointing
from tests.support.run_training import Ended, run_training
from tests.support.user_code import Deed

RUN: dict[str, Any] = {"save_dir": "run", "batch_size": 10, "epochs": 2}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("spoilt.py").write_text(
        """
from tests.support.user_code import tensors

def dataset(split, seed, bad=1):
    inputs, targets = tensors(split, seed).tensors
    if split == "train":
        inputs[:bad] = float("nan")
    return list(zip(inputs, targets))  # what lies in memory as tensors is looked through at the start
"""
    )


class Terminal(io.StringIO):
    """Notes in a file what a terminal would show."""

    def isatty(self) -> bool:
        return True

    def flush(self) -> None:
        Path("screen").write_text(self.getvalue())


def watch_evaluations(moment: float) -> None:
    """A screen that shows an evaluation after so many seconds, each batch of which takes 0.3."""
    console._MOMENT = moment
    Deed.forward = lambda self, inputs: time.sleep(0 if self.training else 0.3) or inputs  # type: ignore[method-assign]
    sys.stdout = Terminal()


def test_a_long_evaluation_shows_its_progress_on_a_terminal() -> None:
    """In the place of the run's bar, which is back when it ends; a short one shows nothing."""
    flags = RUN | {"epochs": 1, "screen": "normal"}
    assert run_training(**flags, prepare=partial(watch_evaluations, 0.2)).error == ""
    drawn = Path("screen").read_text()
    assert "evaluating val: batch 2/2, " in drawn
    assert "evaluating test: batch 1/2, " in drawn
    assert drawn.rindex("step 6/6") > drawn.index("evaluating val")
    short = flags | {"save_dir": "short", "epochs": 2, "max_steps": 8}
    assert run_training(**short, prepare=partial(watch_evaluations, 60.0)).error == ""
    assert "evaluating" not in (drawn := Path("screen").read_text())
    assert re.findall(r"epoch +(\S+/\S+)", drawn)[-1] == "2/2", "the second one is cut short"


def faults() -> list[dict[str, Any]]:
    return [event for event in journal.read_events("run/journal.jsonl") if event["event"] == "fault"]


def folders() -> list[str]:
    return sorted(path.name for path in Path("run/checkpoints").iterdir())


@pytest.mark.parametrize("workers", [1, 2])
def test_a_skipped_step_leaves_no_trace_in_the_statistics(workers: int) -> None:
    ended = run_training(workers, **RUN, data="spoilt:dataset")
    assert ended.error == ""
    assert ended.summary["final"]["val_loss"] < 10
    for name, value in torch.load("run/last.pt", weights_only=True)["model"].items():
        assert torch.isfinite(value).all(), name
    assert sum(int(fault["action"].split()[0]) for fault in faults()) == 2, "one in each epoch"
    assert all(0 in fault["samples"] and len(fault["samples"]) <= 20 for fault in faults()), "the spoilt one is named"


@pytest.mark.parametrize(("batch", "named"), [(8, r"(\d+, ){7}\d+\b(?! …)"), (9, r"(\d+, ){7}\d+ …")])
def test_nonfinite_stop_is_obeyed_however_short_the_run(batch: int, named: str) -> None:
    flags = {"data": "spoilt:dataset", "nonfinite": "stop", "early_stopping_patience": 1, "batch_size": batch}
    ended = run_training(**RUN | flags, drop_last=True, sets=["data.args.bad=60"])
    assert "NaN or infinite" in ended.error
    assert re.search(f"of samples {named}", ended.error)
    assert [fault["kind"] for fault in faults()] == ["nonfinite"]


def test_a_run_that_begins_again_does_so_once() -> None:
    """--resume names an older checkpoint: what came later steps aside, and the same command then goes on."""
    run_training(**RUN, checkpoint_every="3", keep="9")
    assert folders() == ["step_00000003", "step_00000006", "step_00000009", "step_00000012"]
    again = {"epochs": 4, "checkpoint_every": "2", "keep": "9", "resume": "run/checkpoints/step_00000006"}
    del (flags := RUN | again)["save_dir"]
    stopped = run_training(**flags, environ={"OWN_DEED": "0:3:SIGTERM"})
    assert stopped.summary["status"] == "stopped"
    assert {"replaced_step_00000009", "replaced_step_00000012", "step_00000006"} < set(folders())
    ended = run_training(**flags)
    assert ended.summary["steps"] == 24
    assert ended.summary["resumed_from"] == f"run/checkpoints/step_{stopped.summary['steps']:08d}"


def test_a_damaged_checkpoint_stays_as_evidence() -> None:
    run_training(**RUN, checkpoint_every="3", keep="2")
    state = Path("run/checkpoints/step_00000012/state.pt")
    state.write_bytes(state.read_bytes()[:-1])
    assert run_training(**RUN | {"epochs": 6}, checkpoint_every="3", keep="2").error == ""
    assert "damaged_step_00000012" in folders()
    assert "step_00000036" in folders()


# -- which evaluation is the best


def run_with_scores(scores: list[float], **flags: Any) -> Ended:
    """A run whose evaluations have these scores, one an epoch."""
    Path("scores.json").write_text(json.dumps(scores))
    return run_training(**RUN | {"epochs": len(scores), "task": "tests.support.scripted_task:Planned"} | flags)


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ([nan, 0.1, nan], 2),
        ([0.2, nan, 0.1], 1),
        ([-inf, 0.1, 0.3], 3),
        ([0.1, 0.3, 0.3], 2),
        ([nan, nan], None),
    ],
    ids=["nan first", "nan later", "infinite first", "as good again", "nothing but nan"],
)
def test_the_best_is_the_first_of_the_greatest_numbers(scores: list[float], best: int | None) -> None:
    ended = run_with_scores(scores)
    assert ended.error == ""
    assert ended.summary["best"].get("epoch") == best
    assert ended.summary["best_by"] is None, "the score is none of an evaluation's numbers"
    found = torch.load("run/best.pt", weights_only=True)["metrics"]
    assert found.get("epoch") == best, "without a best evaluation these are the last weights"


def test_weights_whose_outputs_are_no_numbers_are_never_the_best() -> None:
    """Also by a metric, which would order them as it does any other."""
    Path("broken.py").write_text(
        """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def dataset(split, seed):
    targets = (torch.arange(40) < 20).long()  # sorted, which a sort of NaN may leave as it is
    return TensorDataset(torch.randn(40, 3, generator=torch.Generator().manual_seed(seed)), targets)

class Broken(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, inputs):
        self.steps += self.training
        outputs = super().forward(inputs)
        return outputs if self.training or self.steps < 4 else outputs * float("nan")
"""
    )
    flags = {"data": "broken:dataset", "model": "broken:Broken", "metric": ["auroc"], "best": "val_auroc:max"}
    ended = run_training(2, **RUN | flags)
    assert ended.error == ""
    assert [json.dumps(event["auroc"]) for event in evaluations()][1] == '"NaN"'
    assert ended.summary["best"]["epoch"] == 1
    assert torch.load("run/best.pt", weights_only=True)["metrics"]["epoch"] == 1


def evaluations() -> list[dict[str, Any]]:
    return [event for event in journal.read_events("run/journal.jsonl") if event.get("split") == "val"]


@pytest.mark.parametrize(
    ("scores", "epochs"), [([nan, nan, nan, 0.1, nan, 0.1, 0.1], 6), ([0.1, 0.2, 0.1, 0.1, 0.3], 4)]
)
def test_patience_counts_from_the_best_number(scores: list[float], epochs: int) -> None:
    assert run_with_scores(scores, early_stopping_patience=2).summary["epochs"] == epochs


def test_a_task_that_evaluates_now_and_then_does_so_after_the_last_epoch_too() -> None:
    Path("even").touch()
    assert run_with_scores([0.1, 0.2, 0.3], epochs=5).error == ""
    assert [event["epoch"] for event in evaluations()] == [2, 4, 5]


def test_best_weights_that_could_not_be_written_are_written_with_the_next_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is heard of at a log line, long before there is anything new to write."""
    failures = iter([OSError(ENOSPC, "No space left on device")])

    def save_weights(*parts: Any) -> str:
        for error in failures:
            raise error
        return weights.save_weights(*parts)

    monkeypatch.setattr(checkpointing, "save_weights", save_weights)
    ended = run_with_scores([0.3, 0.2, 0.1], log_interval=1)
    assert ended.error == ""
    assert [fault["kind"] for fault in faults()] == ["checkpoint"]
    assert torch.load("run/best.pt", weights_only=True)["metrics"]["epoch"] == 1


def test_a_longer_run_has_all_its_patience_again() -> None:
    patient: dict[str, Any] = {"early_stopping_patience": 2, "epochs": 5}
    assert run_with_scores([0.2, 0.1, 0.1], **patient).summary["epochs"] == 3
    longer = run_with_scores([0.1, 0.1], **patient | {"epochs": 9}).summary
    assert (longer["epochs"], longer["best"]["epoch"]) == (5, 1)
