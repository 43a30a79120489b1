"""A run is opened, failed and closed in one place, whoever drives it; and what --verbose says of it."""

import io
import json
import multiprocessing
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from multigpu_cli import engine
from multigpu_cli.checkpoint.files import is_locked
from multigpu_cli.config.sources import resolve
from multigpu_cli.distributed.placement import Placement
from multigpu_cli.errors import RequestError
from multigpu_cli.monitor import journal
from multigpu_cli.monitor.console import Console
from multigpu_cli.monitor.format import format_epoch
from multigpu_cli.run import evaluation, finalize
from multigpu_cli.run.assembly.components import TrainComponents
from multigpu_cli.run.batch_size import halve_micro_batch
from multigpu_cli.run.finalize import finish_run
from multigpu_cli.run.open import open_run, record_failure, resolve_request
from multigpu_cli.run.request.spec import FromConfig
from multigpu_cli.run.run import Run
from tests.support.run_training import run_training


@contextmanager
def prepare_run(folder: Path, out: io.StringIO | None = None, **more: str) -> Iterator[Run]:
    """A run of one epoch, six steps, before its first one.

    Args:
        out: where it says what it says; None: it says nothing.
    """
    flags = {
        "data": "tests.support.user_code:tensors",
        "model": "tests.support.user_code:net",
        "save_dir": str(folder),
        "batch_size": "10",
    }
    choice = Placement("single", (torch.device("cpu"),), 0, "a test")
    config = resolve(flags | {"epochs": "1"} | more, [], None)
    console = Console("normal", out) if out else Console("quiet", io.StringIO())
    with resolve_request(config, choice, None, console, print, FromConfig()) as request, open_run(request) as run:
        yield run


def ends(folder: Path) -> list[str]:
    """The status in the summary, then those of the journal's last lines."""
    said = [event["status"] for event in journal.read_events(str(folder / "journal.jsonl")) if event["event"] == "end"]
    return [json.loads((folder / "summary.json").read_text())["status"], *said]


def test_a_run_that_its_caller_leaves_counts_as_stopped_and_goes_on_later(tmp_path: Path) -> None:
    with prepare_run(tmp_path) as run:
        assert engine.fit(run, until=6) == "completed"
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)
    assert ends(tmp_path) == ["stopped", "stopped"]
    (tmp_path / "checkpoints/.draft_step_00000009").mkdir()  # as a kill leaves them
    (tmp_path / ".best.pt.1.draft").touch()
    with prepare_run(tmp_path) as run:
        assert not [path for path in tmp_path.rglob("*") if "draft" in path.name]
        assert run.progress.step == 6
        finish_run(run, "completed")
    assert ends(tmp_path) == ["completed", "stopped", "completed"]


def test_a_run_that_its_caller_leaves_says_that_its_last_checkpoint_is_not_there(tmp_path: Path) -> None:
    with prepare_run(tmp_path) as run:
        (tmp_path / "checkpoints").touch()  # in the way of the folder
        engine.fit(run, until=6)
    (fault,) = [event for event in journal.read_events(str(tmp_path / "journal.jsonl")) if event["event"] == "fault"]
    assert fault["action"].startswith("a checkpoint was not written ([Errno")


def test_a_run_that_is_to_pause_stops_after_that_step(tmp_path: Path) -> None:
    with prepare_run(tmp_path) as run:
        run.control.pause_at = 3
        phases, begin = [], run.loaders.train.epoch

        def note(*args: Any) -> Any:
            phases.append(run.observer.watchdog.own.phase)
            return begin(*args)

        run.loaders.train.epoch = note  # type: ignore[method-assign,assignment]
        assert (engine.fit(run), run.progress.step) == ("stopped", 3)
        assert phases == ["fetching data"]


def test_a_run_that_is_done_has_saved_its_end_and_says_which_weights_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finalize, "restore_file", lambda *_: False)
    with prepare_run(tmp_path, checkpoint_every="4") as run:
        status = engine.fit(run)
        assert run.checkpointer.saved_step == run.progress.step == 6, "whether or not a checkpoint is due"
        run.log.progress_bar = Mock(wraps=run.log.progress_bar)
        finish_run(run, status)
        run.log.progress_bar.close.assert_called_once()
        assert [fault["action"] for fault in run.progress.faults] == ["best.pt is lost: the last weights replace it"]


def test_evaluations_leave_nothing_behind_in_model_and_task(tmp_path: Path) -> None:
    with prepare_run(tmp_path) as run:
        shown = run.task.batch_evaluated
        finish_run(run, engine.fit(run))
        assert run.task.batch_evaluated == shown
        assert not run.state.eval_model()._forward_pre_hooks


def test_an_epoch_is_one_line_and_the_end_is_no_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(evaluation, "format_epoch", lambda *given: told.append(given[3:]) or format_epoch(*given))
    with prepare_run(
        tmp_path, out := io.StringIO(), epochs="2", log_interval="100", lr="1e-30", schedule="constant"
    ) as run:
        finish_run(run, engine.fit(run))
        shown, so_far = out.getvalue(), run.log.at_last_epoch
    assert [rate * seconds for rate, seconds in told] == pytest.approx([60, 60])
    assert sum(seconds for _, seconds in told) == pytest.approx(so_far[1])
    lines = re.findall(r"^epoch +(\d/\d)  train loss +[\d.]+  val loss +[\d.]+  .*?(best)?$", shown, re.MULTILINE)
    assert lines == [("1/2", "best"), ("2/2", "")], "nothing is learned in the second"
    assert "stopped" not in shown
    assert re.findall(r"^epoch \d +(\w+) +loss", shown, re.MULTILINE) == ["test"], "val is in the lines"


def test_only_a_run_of_another_length_says_that_its_schedule_is_another(tmp_path: Path) -> None:
    with prepare_run(tmp_path) as run:
        assert engine.fit(run, until=6) == "completed"
    for epochs, said in (("1", False), ("2", True)):
        with prepare_run(tmp_path, out := io.StringIO(), epochs=epochs):
            shown = out.getvalue()
        assert ("the run now has 12 steps: the schedule was recomputed" in shown) == ("recomputed" in shown) == said
        assert "Learning rates" not in shown, "all parameters learn at one"


def test_a_dry_run_shows_the_rates_that_the_run_will(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sets = ["optimizer.rates={'*.bias': 0.5}"]
    assert not run_training(save_dir=str(tmp_path / "run"), dry_run=True, lr=0.01, screen="normal", sets=sets).error
    assert "\nLearning rates\n" in capfd.readouterr().out


@pytest.mark.parametrize("built", [False, True], ids=["while it is built", "afterwards"])
def test_a_refused_run_leaves_no_loader_process_behind(
    built: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook goes on after it; and garbage collection may end such processes by closing others' files."""
    others = multiprocessing.active_children()  # an earlier test's, in the same process

    def refuse(components: TrainComponents) -> None:
        assert set(multiprocessing.active_children()) - set(others)
        raise RequestError("another run is using the folder since a moment ago")

    monkeypatch.setattr("multigpu_cli.run.open.fit_batch_sizes_to_memory", refuse)
    other = torch.nn.Linear(2, 2).state_dict()
    torch.save(other, tmp_path / "other.pt")
    words: dict[str, Any] = {"data": "tests.run.test_build_components:Pictures", "model": "convnet", "num_workers": "1"}
    weights: dict[str, Any] = {} if built else {"init_from": str(tmp_path / "other.pt")}
    with pytest.raises(RequestError, match="a moment ago" if built else "other.pt"):
        prepare_run(tmp_path / "run", **words, **weights).__enter__()
    assert not set(multiprocessing.active_children()) - set(others)


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=["error", "interrupted"])
def test_a_failure_is_recorded_once_whether_it_leaves_the_run_or_only_a_call(
    error: BaseException, tmp_path: Path
) -> None:
    with pytest.raises(type(error)), prepare_run(tmp_path / "whole"):
        raise error
    for restarts, printed in enumerate([1, 0]):
        with prepare_run(tmp_path / "call") as run:
            told: list[Any] = []
            run.log.console.print_json = told.append  # type: ignore[method-assign,assignment]
            run.world = replace(run.world, restarts_left=restarts)
            with pytest.raises(type(error)), record_failure(run):
                raise error
        assert len(told) == printed
    assert ends(tmp_path / "whole") == ["failed", "failed"]
    assert ends(tmp_path / "call") == ["failed", "failed", "failed"]


def test_an_error_after_the_end_leaves_the_summary_as_it_is(tmp_path: Path) -> None:
    """What a run has left counts, whatever becomes of showing it."""
    with suppress(KeyboardInterrupt), prepare_run(tmp_path) as run:
        finish_run(run, engine.fit(run))
        raise KeyboardInterrupt
    assert ends(tmp_path) == ["completed", "completed"]


def test_micro_batches_that_memory_has_halved_run_compiled_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    with prepare_run(tmp_path, compile="default") as run:
        assert run.compiled is not None
        assert run.compiled.full_batch_size() == 10
        halve_micro_batch(run)
        assert run.compiled.full_batch_size() == 5
        run.task.rows_per_sample = 2
        assert run.compiled.full_batch_size() == 10


def test_verbose_says_what_was_chosen_and_each_checkpoint_and_where_rank_1_speaks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    flags: dict[str, Any] = {"save_dir": str(folder), "batch_size": 10, "epochs": 2, "log_interval": 3}
    flags |= {"data": "tests.support.user_code:wide", "freeze": ["2.weight"]}
    ended = run_training(
        3, screen="verbose", environ={"OWN_DEED": "1:6:SIGCONT"}, **flags
    )  # rank 1 says so, and goes on
    assert ended.error == ""
    out = capfd.readouterr().out
    shown = dict(
        re.findall(r"^ (\w[\w ]*?) {2,}(.*)$", out.partition("Details\n")[2].partition("step ")[0], re.MULTILINE)
    )
    assert shown["versions"].startswith(f"torch {torch.__version__}, Python 3.")
    assert shown["model"] == "tests.support.user_code:net: 80,083 parameters, 83 trained, 0.3 MiB"
    assert shown["samples"] == "60 training, 21 validation, 22 test; in host memory; evaluated in batches of 20"
    assert re.search(r"\n best epoch  +[12] \(by val accuracy; val loss ", out)
    assert "\n optimizer      adamw, weight decay 0.0001, gradient clipped to norm 1\n" in out
    assert shown["checkpoints"] == "every epoch, 3 are kept"
    assert re.fullmatch(r"gloo, buckets of \d+ MiB", shown["gradients"])
    assert shown["other ranks"] == f"print to {folder}/logs/rank_1.log … rank_2.log"
    assert f"\noutput of rank 1: {folder}/logs/rank_1.log\n" in out
    head, *said = (folder / "logs" / "rank_1.log").read_text().splitlines()
    assert (head[:23], said) == ("--- rank 1, attempt 1, ", ["rank 1 does it"])
    assert "does it" not in out
    memory = r"([\d.]+ [MG]iB)"  # a forked rank has the memory of the tests that ran before it
    assert len(re.findall(rf"^  loss .* grad norm .* memory {memory} / {memory} ", out, re.MULTILINE)) == 2
    assert re.search(r"^checkpoint of step 2: \d\.\d MiB in [\d.]+ s, ", out, re.MULTILINE)
