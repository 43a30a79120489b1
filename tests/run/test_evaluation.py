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
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, MagicMock, Mock, call

import pytest
import torch

from multigpu_cli.checkpoint import weights
from multigpu_cli.checkpoint.snapshot import Progress
from multigpu_cli.errors import EvaluationStopped, TrainingError
from multigpu_cli.monitor import console, journal
from multigpu_cli.run import checkpointing, evaluation
from multigpu_cli.tasks.base import Evaluation
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
    """A screen that shows every step, and an evaluation after so many seconds, each batch of which takes 0.3."""
    console._MOMENT, update = moment, console.TqdmDisplay.update

    def draw(self: console.TqdmDisplay, *given: Any) -> None:
        self._bar.mininterval = 0
        update(self, *given)

    console.TqdmDisplay.update = draw  # type: ignore[method-assign, assignment]
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


# -- each decision, on parts that note what is asked of them


@pytest.mark.parametrize("show", [True, False])
def test_an_evaluation_is_told_to_all_who_ask(show: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    result = Evaluation({"loss": 2.0}, 21, {})
    monkeypatch.setattr(evaluation, "_evaluate_in_batches", lambda *_: result)
    run = MagicMock(progress=Progress(step=6, last={"train_loss": 1.0}), epoch=2)
    run.moments.evaluated = (run.told,)
    assert evaluation.evaluate(run, "val", Mock(), **{} if show else {"show": False}) is result
    run.log.journal.write.assert_called_once_with("eval", epoch=2, step=6, split="val", samples=21, loss=2.0)
    assert run.log.console.eval.mock_calls == [call(run.log.journal.write.return_value)] * show
    assert run.progress.last == {"train_loss": 1.0, "val_loss": 2.0}
    run.told.assert_called_once_with(run, "val", {"loss": 2.0})


@pytest.mark.parametrize(
    ("sharded", "error", "ends"),
    [
        (False, torch.OutOfMemoryError("played"), False),
        (False, RuntimeError("mine"), False),
        (True, RuntimeError("mine"), False),
        (True, torch.OutOfMemoryError("played"), True),
    ],
)
def test_where_others_wait_in_a_pass_lack_of_memory_ends_the_attempt(
    sharded: bool, error: RuntimeError, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, loader, ended = MagicMock(), Mock(size=21), TrainingError("ended")
    run.strategy.sharded, run.task.evaluate.side_effect, run.eval_batch_size, run.world.size = sharded, error, 10, 1
    monkeypatch.setattr(evaluation, "end_evaluation_without_memory", Mock(side_effect=ended))
    with pytest.raises((RuntimeError, TrainingError)) as raised:
        evaluation._evaluate_in_batches(run, Mock(), "val", loader)
    assert raised.value is (ended if ends else error)


@pytest.mark.parametrize(("size", "workers", "batches"), [(21, 1, 3), (20, 1, 2), (25, 2, 1), (21, 4, 0), (None, 1, 0)])
def test_the_bar_of_an_evaluation_has_the_batches_of_one_rank(size: int | None, workers: int, batches: int) -> None:
    run, loader = MagicMock(eval_batch_size=10), SimpleNamespace(**{"size": size} if size else {})
    run.world.size, run.task.batch_evaluated = workers, "before"
    shown = run.log.console.evaluation_progress
    with evaluation._show_progress(run, "val", loader):  # type: ignore[arg-type]
        assert run.task.batch_evaluated == shown.return_value.__enter__.return_value.update
    shown.assert_called_once_with("val", batches)
    assert isinstance(shown.call_args.args[1], int)
    assert run.task.batch_evaluated == "before"


@pytest.mark.parametrize(
    ("reached", "step", "wanted", "evaluates"),
    [("", 6, False, False), ("", 6, True, True), ("", 12, False, True), ("solved", 6, False, True)],
)
@pytest.mark.parametrize(("validated", "followed"), [(True, False), (False, True), (False, False)])
def test_last_epoch_is_evaluated_whatever_the_task_says(
    reached: str, step: int, wanted: bool, evaluates: bool, validated: bool, followed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    run = MagicMock(progress=Progress(step=step, last={}, best={"step": step}), epoch=1, epochs=2)
    type(run).finished = property(lambda self: self.progress.stopped_early or self.progress.step == 12)
    run.task.stop_reason.return_value, run.task.should_evaluate.return_value = reached, wanted
    run.loaders.val, run.moments.epoch_end = Mock() if validated else None, (run.told,) if followed else ()
    run.observer.timer.samples, run.observer.timer.seconds, run.log.at_last_epoch = 60, 3.0, (0, 0.0)
    for name in ("report_skipped_steps", "evaluate", "track_best", "use_published_weights", "save_evaluation"):
        monkeypatch.setattr(evaluation, name, getattr(run, name))
    run.evaluate.return_value = Evaluation({"loss": 2.0}, 21, {})
    evaluation.plan_evaluation(run)
    run.report_skipped_steps.assert_called_once_with(run)
    run.observer.loss.all_reduce_pending.assert_called_once_with()
    assert run.progress.stopped_early is bool(reached)
    assert run.log.console.note.mock_calls == [call(f"ending early: {reached}")] * bool(reached)
    assert run.progress.evaluation_pending is ((evaluates and validated) or followed)
    assert evaluation.evaluate_epoch(run)
    assert run.evaluate.called == (evaluates and validated)
    assert run.log.console.epoch.mock_calls == [call(ANY, best=validated)] * evaluates
    assert run.told.called == followed
    assert run.save_evaluation.called == ((evaluates and validated) or followed)
    assert not run.progress.evaluation_pending
    run.evaluate.side_effect, run.progress.evaluation_pending = EvaluationStopped, True
    assert evaluation.evaluate_epoch(run) is not (evaluates and validated)
    assert run.progress.evaluation_pending is (evaluates and validated)


def test_what_counts_as_better_is_kept_and_what_does_not_is_counted() -> None:
    """By patience 2; each score of one evaluation may be several numbers."""
    run = MagicMock(progress=Progress(), score=None, epoch=0)
    run.config.length.early_stopping_patience = 2
    run.checkpointer.saver.capture_best.side_effect = lambda _: run.checkpointer.best == {} and {"epoch": run.epoch}
    told = [
        ([nan, 1.0], {}, 0),
        ([0.1, 1.0], {"epoch": 2}, 0),
        ([0.1, 1.0], {"epoch": 2}, 1),
        ([0.1, 2.0], {"epoch": 4}, 0),
        ([0.3, nan], {"epoch": 4}, 1),
    ]
    for run.epoch, (scores, kept, stale) in enumerate(told, 1):
        run.task.score.return_value, run.progress.step = scores, 6 * run.epoch
        run.checkpointer.best = dict(run.checkpointer.best) if run.epoch > 1 else {}
        evaluation.track_best(run, Evaluation({"loss": 0.5}, 21, {}))
        assert (run.checkpointer.best, run.progress.stale_epochs, run.progress.stopped_early) == (kept, stale, False)
    assert run.progress.best == {"epoch": 4, "step": 24, "loss": 0.5, "val_loss": 0.5}
    assert run.progress.score == [0.1, 2.0]
    run.config.length.early_stopping_patience = 0
    evaluation.track_best(run, Evaluation({"loss": 0.5}, 21, {}))
    assert (run.progress.stale_epochs, run.progress.stopped_early) == (2, False)
    run.config.length.early_stopping_patience = 3
    evaluation.track_best(run, Evaluation({"loss": 0.5}, 21, {}))
    assert run.progress.stopped_early is True
    run.log.console.note.assert_called_once_with("stopping early: no improvement in 3 epochs")
    run.score = lambda metrics: [metrics["loss"]]
    evaluation.track_best(run, Evaluation({"loss": 0.6}, 21, {}))
    assert (run.progress.score, run.progress.stale_epochs) == ([0.6], 0), "the user's own score comes first"
