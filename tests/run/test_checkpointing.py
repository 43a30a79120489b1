"""--checkpoint-every in minutes: by the clock of whichever rank is the first, agreed by all; and what is kept."""

import time
from pathlib import Path
from typing import Any
from unittest.mock import ANY, MagicMock, Mock, call

import pytest
import torch

from multigpu_cli.checkpoint.snapshot import Progress
from multigpu_cli.checkpoint.store import BestWeights
from multigpu_cli.config.schema import CheckpointConfig
from multigpu_cli.errors import TrainingError
from multigpu_cli.monitor import journal
from multigpu_cli.run import checkpointing
from multigpu_cli.run import run as run_module
from multigpu_cli.run.run import CheckpointSchedule
from tests.support.run_training import run_training

RUN: dict[str, Any] = {"save_dir": "run", "batch_size": 10, "epochs": 8}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the run's clock shows; only where checkpoints are timed."""
    now = [0.0]

    class Time:
        monotonic = staticmethod(lambda: now[0])
        perf_counter = staticmethod(time.perf_counter)

    monkeypatch.setattr(run_module, "time", Time)
    return now


def test_minutes_count_from_the_last_checkpoint(clock: list[float]) -> None:
    every = CheckpointSchedule(CheckpointConfig(every="10m"))
    clock[0] = 599
    assert not every.overdue()
    clock[0] = 600
    assert every.overdue()
    every.mark_saved()
    assert not every.overdue()
    clock[0] = 1200
    assert every.overdue()
    assert not every.update_due(6, 7, epoch_ended=True), "minutes take the place of the epochs"


def test_what_is_due_stays_due_until_it_is_saved() -> None:
    """A rollout is not cut in its middle: what falls due there is saved at its end."""
    every = CheckpointSchedule(CheckpointConfig(every="3"))
    assert [every.update_due(step - 1, step, epoch_ended=False) for step in (1, 2, 3, 4, 5)] == [
        False,
        False,
        True,
        True,
        True,
    ]
    every.mark_saved()
    assert [every.update_due(step - 1, step, epoch_ended=True) for step in (5, 6)] == [False, True]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_saves_by_the_minute(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    """Every look at the clock costs half a minute: overdue is asked once a step, and saved resets it."""
    monkeypatch.chdir(tmp_path)

    def ticking() -> float:
        clock[0] += 30.0
        return clock[0]

    monkeypatch.setattr("multigpu_cli.run.run.time.monotonic", staticmethod(ticking))
    steps = 48 // workers
    slow = {"OWN_PAUSE": "0.08"} if workers > 1 else {}
    assert run_training(workers, **RUN, checkpoint_every="1m", keep="99", environ=slow).error == ""
    saved = [event["step"] for event in journal.read_events("run/journal.jsonl") if event["event"] == "checkpoint"]
    assert saved[-1] == steps
    if workers == 1:
        assert saved == list(range(2, steps + 1, 2))
    else:
        assert len(saved) >= 2, "they meet every half second or so, and at the first step"


def test_the_best_weights_outlive_the_checkpoint_they_came_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--keep 1: the best evaluation was many checkpoints ago, and best.pt still holds its weights."""
    monkeypatch.chdir(tmp_path)
    best = run_training(**RUN | {"keep": "99", "save_dir": "all"}).summary["best"]
    ended = run_training(**RUN, keep="1")
    assert ended.summary["faults"] == []
    assert ended.summary["best"]["step"] == best["step"] < 48
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["step_00000048"]
    found = torch.load("run/best.pt", weights_only=True)["model"]
    then = torch.load(f"all/checkpoints/step_{best['step']:08d}/state.pt", weights_only=True)["model"]
    assert all(torch.equal(found[name], then[name]) for name in then)


# -- what a checkpoint is made of, on parts that note what is asked of them


def note_calls(monkeypatch: pytest.MonkeyPatch, *names: str) -> MagicMock:
    """A run, with functions of the room in whose place their calls are noted, in the order of all."""
    run = MagicMock(name="run")
    for name in names:
        monkeypatch.setattr(checkpointing, name, getattr(run, name))
    return run


@pytest.mark.parametrize("main", [True, False])
def test_a_checkpoint_is_copied_when_all_that_it_holds_is_there(main: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = ("check_replicas", "finish_pending_checkpoint", "_collect_state", "_save_on_main_rank")
    run = note_calls(monkeypatch, *parts)
    run.world.is_main, run.progress.step, run.moments.saved = main, 6, (run.told,)
    snapshot = run.checkpointer.saver.capture.return_value if main else None
    run.checkpointer.saver.capture.return_value = snapshot
    checkpointing.save_checkpoint(run)
    state = run.state
    shared = {"num_shards": run.strategy.num_shards, "find_parameter": run.strategy.find_parameter}
    assert [each for each in run.mock_calls if "__" not in each[0]] == [
        call.observer.watchdog.set_position(6, "saving"),
        call.observer.timer.pause(),
        call.observer.loss.all_reduce_pending(),
        call.check_replicas(state.model, run.world, 6, state.optimizer, **shared),
        call.task.state(run.world),
        call.checkpointer.saver.wait(),
        *[call.finish_pending_checkpoint(run)] * main,
        call.told(run),
        call._collect_state(run, run.task.state.return_value),
        call.checkpointer.saver.capture(state, run._collect_state.return_value, 6),
        *[call._save_on_main_rank(run, snapshot, ANY)] * main,
        call.checkpointer.schedule.mark_saved(),
    ]
    assert run.checkpointer.saved_step == 6


@pytest.mark.parametrize("best", [True, False])
@pytest.mark.parametrize("at_once", [True, False])
def test_what_is_written_has_its_seconds(
    best: bool, at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second goes by whenever someone looks at the clock. It may be written while training waits, or later."""
    run, snapshot, weights = note_calls(monkeypatch, "check_owner", "save_weights"), Mock(peers=None), {"w": 1}
    clock = iter(range(8, 99))
    monkeypatch.setattr(checkpointing, "time", Mock(perf_counter=lambda: float(next(clock))))
    run.folder, run.progress.step, run.world.size = tmp_path, 6, 2
    run.progress.best, run.checkpointer.best = ({"step": 4}, weights) if best else ({}, {})
    run.save_weights.side_effect = lambda file, state, *_: str(state)
    run.spec.checkpoint_metadata.return_value = {"spec": 1}
    run.checkpointer.writer.waited, run.checkpointer.store.save.return_value = 0.5, 2**20
    copies: list[Any] = []
    run.checkpointer.writer.submit.side_effect = lambda copy, job: job() if at_once else copies.append((copy, job))
    checkpointing._save_on_main_rank(run, snapshot, 7.0)
    assert run.checkpointer.in_flight == 6
    for copy, job in copies:
        assert copy == snapshot.finish
        job()
    run.check_owner.assert_called_once_with(tmp_path)
    told = (tmp_path / "best.pt", weights, run.spec.weights_metadata(), {"step": 4}, ANY)
    assert run.save_weights.mock_calls == [call(*told)] * best
    assert weights == ({} if best else {"w": 1}), "their memory is free once they are on disk"
    facts = {"spec": 1, "world_size": 2, "versions": {"torch": torch.__version__}}
    so_far = BestWeights(tmp_path / "best.pt", "{'w': 1}") if best else None
    run.checkpointer.store.save.assert_called_once_with(6, snapshot.state, facts, so_far, None)
    seconds, stall = (2.0, 1.5) if at_once else (3.0, 2.5)
    run.log.journal.write.assert_called_once_with(
        "checkpoint", step=6, seconds=seconds, stall_seconds=stall, bytes=2**20
    )


def test_what_other_ranks_have_begun_is_abandoned_where_it_can_not_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    run, snapshot = note_calls(monkeypatch, "check_owner"), Mock()
    run.progress.best, run.checkpointer.best, run.checkpointer.writer.waited = {}, {}, 0.0
    run.checkpointer.writer.submit.side_effect = lambda _, job: job()
    run.checkpointer.store.save.return_value = 1
    checkpointing._save_on_main_rank(run, snapshot, 7.0)
    snapshot.peers.abandon.assert_not_called()
    run.checkpointer.store.save.side_effect = OSError("full")
    with pytest.raises(OSError, match="full"):
        checkpointing._save_on_main_rank(run, snapshot, 7.0)
    snapshot.peers.abandon.assert_called_once_with()


def test_the_newest_on_disk_is_known_from_how_its_writing_ended() -> None:
    run = Mock()
    for main in (True, False):
        run.world.is_main, run.moments.written, told = main, (run.told,), run.told.call_count
        run.checkpointer.writer.wait.return_value, run.checkpointer.in_flight = None, 6
        checkpointing.finish_pending_checkpoint(run)
        assert (run.checkpointer.written, run.checkpointer.in_flight, run.told.call_count - told) == (6, 6, main)
    run.log_fault.assert_not_called()
    run.checkpointer.writer.wait.return_value, run.checkpointer.in_flight = OSError("full"), 9
    checkpointing.finish_pending_checkpoint(run)
    assert (run.checkpointer.written, run.checkpointer.in_flight) == (6, 6)
    said = "a checkpoint was not written (full); the next one is tried as planned"
    run.log_fault.assert_called_once_with("checkpoint", said)


def test_a_checkpoint_has_the_seconds_of_this_attempt_and_the_entries_of_all_parts() -> None:
    run, progress = Mock(), Progress(train_seconds=5.0)
    run.progress, run.observer.timer.seconds = progress, 3.0
    run.state.state_dict = lambda task: {"model": {}, "task": task, "seconds": progress.train_seconds}
    run.moments.state_dict = (lambda _: {"hooks": {"a": 1}}, lambda _: {"own": 2})
    found = checkpointing._collect_state(run, {"t": 1})
    assert found == {"model": {}, "task": {"t": 1}, "seconds": 8.0, "hooks": {"a": 1}, "own": 2}
    assert progress.train_seconds == 5.0
    run.moments.state_dict = ()
    assert checkpointing._collect_state(run, {})["hooks"] == {}


def test_the_last_checkpoint_is_there_when_all_ranks_have_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writing of rank 0 waits for that of the others, which are asked first: their failure is the cause."""
    asked: list[Any] = []
    monkeypatch.setattr(checkpointing, "run_on_all_ranks", lambda world, work: asked.append(None) or work())
    for main in (True, False):
        asked.clear()
        run = Mock(folder=Path("run"))
        run.world.is_main, run.moments.saved, run.checkpointer.in_flight = main, (run.told,), 6
        run.checkpointer.writer.wait.side_effect = lambda: asked.append("wrote")
        checkpointing.wait_for_last_checkpoint(run)
        assert asked == ([None, None, "wrote"] if main else [None, "wrote", None, "wrote"])
        assert run.checkpointer.written == 6
        run.told.assert_called_once_with(run)
        run.checkpointer.writer.wait.side_effect = lambda: OSError("full")
        with pytest.raises(TrainingError, match="the last checkpoint could not be written to run: full"):
            checkpointing.wait_for_last_checkpoint(run)
