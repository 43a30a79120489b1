"""How a run ends, step by step, on parts that note what is asked of them; whole runs are in other files."""

from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock, call

import pytest
import torch

from multigpu_cli.checkpoint.snapshot import Progress
from multigpu_cli.errors import EvaluationStopped, TrainingError
from multigpu_cli.run import finalize


def note_calls(monkeypatch: pytest.MonkeyPatch, *names: str) -> MagicMock:
    """A run, with functions of the room in whose place their calls are noted."""
    run = MagicMock(name="run")
    for name in names:
        monkeypatch.setattr(finalize, name, getattr(run, name))
    return run


@pytest.mark.parametrize("status", ["completed", "stopped"])
def test_a_run_ends_with_the_peaks_of_all_ranks(status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = ("finish_completed", "wait_for_last_checkpoint", "build_summary", "write_run_end")
    run, done = note_calls(monkeypatch, *parts), status == "completed"
    monkeypatch.setattr(finalize, "all_gather_object", lambda world, own: [own, 7])
    monkeypatch.setattr(finalize, "peak_memory", lambda device: 5)
    run.finish_completed.return_value = {"fingerprint": "f"}
    summary = run.build_summary.return_value
    assert finalize.finish_run(run, status) is summary
    assert run.log.state.ending is True
    end = {"peak_memory_bytes": [5, 7]} | ({"fingerprint": "f"} if done else {})
    assert run.mock_calls == [
        *([call.finish_completed(run)] if done else [call.wait_for_last_checkpoint(run)]),
        *[call.observer.watchdog.record_stop()] * (not done),
        call.log.progress_bar.close(),
        call.build_summary(run, status, end),
        call.write_run_end(run, summary),
    ]


def test_run_left_in_its_last_evaluation_counts_as_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    run = note_calls(monkeypatch, "finish_completed", "build_summary", "write_run_end")
    monkeypatch.setattr(finalize, "all_gather_object", lambda world, own: [own])
    monkeypatch.setattr(finalize, "peak_memory", lambda device: 5)
    run.finish_completed.side_effect = EvaluationStopped
    finalize.finish_run(run, "completed")
    run.build_summary.assert_called_once_with(run, "stopped", {"peak_memory_bytes": [5]})
    run.observer.watchdog.record_stop.assert_called_once_with()


@pytest.mark.parametrize("saved", [5, 6])
@pytest.mark.parametrize("best", [{}, {"w": 1}])
@pytest.mark.parametrize("free", [True, False])
def test_a_completed_run_evaluates_its_best_weights(
    saved: int, best: dict[str, int], free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = ("save_checkpoint", "wait_for_last_checkpoint", "evaluate")
    run = note_calls(monkeypatch, *parts)
    monkeypatch.setattr(finalize, "is_schedule_free", lambda optimizer: free)
    monkeypatch.setattr(finalize, "run_on_main_rank", lambda world, work: work())
    monkeypatch.setattr(finalize, "run_on_all_ranks", lambda world, work: work())
    monkeypatch.setattr(finalize, "fingerprint", lambda state: f"of {state}")
    monkeypatch.setattr(finalize, "_publish_weights", lambda run, state: best)
    run.checkpointer.saved_step, run.progress.step, run.world.is_main = saved, 6, True
    run.strategy.gather_state.return_value = {"model": "last"}
    run.strategy.scatter_state.side_effect = lambda state, into: state
    run.evaluate.return_value.details = {"table": 1}
    model = run.state.eval_model.return_value
    run.state.average = free
    assert finalize.finish_completed(run) == {"fingerprint": "of last", "table": 1}
    kept = ["save_checkpoint", "wait_for_last_checkpoint", "state.optimizer.eval", "evaluate"]
    kept += ["state.eval_model().load_state_dict", "state.model.load_state_dict"]
    assert [each for each in run.mock_calls if each[0] in kept] == [
        *[call.save_checkpoint(run)] * (saved == 5),
        call.wait_for_last_checkpoint(run),
        *[call.state.optimizer.eval()] * free,
        *[call.state.eval_model().load_state_dict(best)] * bool(best),
        *[call.state.model.load_state_dict(model.state_dict.return_value)] * free,
        call.evaluate(run, "test", run.loaders.test),
    ]
    run.world.is_main, run.loaders.test = False, None
    assert finalize.finish_completed(run) == {"fingerprint": "of last"}
    assert run.strategy.scatter_state.call_args.args == ({"model": {}},), "rank 0 has them"


@pytest.mark.parametrize(("best", "there"), [({}, False), ({"step": 4}, True), ({"step": 4}, False)])
def test_the_last_weights_are_published_and_the_best_where_they_are_there(
    best: dict[str, float], there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = note_calls(monkeypatch, "check_owner", "save_weights", "restore_file", "read_weights")
    monkeypatch.setattr(finalize, "copy_to_host", lambda state: state)
    run.folder, run.progress, run.restore_file.return_value = tmp_path, Progress(best=best, last={"loss": 1.0}), there
    found = finalize._publish_weights(run, {})
    assert found == (run.read_weights.return_value if there else {})
    run.check_owner.assert_called_once_with(tmp_path)
    rest: Any = ({}, run.spec.weights_metadata(), {"loss": 1.0}, run.observer.watchdog.mark_progress)
    names = ["last.pt"] if there else ["last.pt", "best.pt"]
    assert run.save_weights.mock_calls == [call(tmp_path / name, *rest) for name in names]
    lost = call("checkpoint", "best.pt is lost: the last weights replace it")
    assert run.log_fault.mock_calls == [lost] * (bool(best) and not there)


@pytest.mark.parametrize("steps", [0, 6])
def test_a_summary_says_all_of_a_run(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finalize, "peak_memory", lambda device: 5)
    run, fault = MagicMock(), {"kind": "restart"}
    last, best = {"train_loss": 1.0, "val_loss": 2.0, "val_top5": 0.5}, {"step": 4, "val_loss": 2.0}
    run.progress = Progress(
        step=7, best=best, score=[-2.0], train_seconds=5.0, startup_seconds=2.0, last=last, faults=[fault]
    )
    run.plan.strategy, run.plan.device, run.plan.precision, run.world.size = "ddp", "cpu", "off", 2
    batches, timer, train = run.plan.batches, run.observer.timer, run.loaders.train
    batches.workers, batches.steps_per_epoch, batches.global_batch = 3, 2, 20
    train.optimizer_steps_done_at.side_effect = lambda step, given: (step, given == batches)
    train.samples_seen_at.side_effect = lambda step, given: (20 * step, given == batches)
    timer.seconds, timer.steps, timer.samples_per_second = 3.0, steps, 10.0
    timer.step_ms.return_value = {"p50": 1.0, "p95": 2.0}
    run.folder, run.spec.resume_point.checkpoint = Path("run"), "before"
    assert finalize.build_summary(run, "stopped", {"error": "none"}) == {
        "status": "stopped",
        "strategy": "ddp",
        "world_size": 2,
        "devices": 3,
        "device": "cpu",
        "precision": "off",
        "epochs": 3,
        "steps": (7, True),
        "samples": (140, True),
        "global_batch_size": 20,
        "train_seconds": 8.0,
        "startup_seconds": 2.0,
        "samples_per_second": 10.0 if steps else None,
        "step_ms": {"p50": 1.0, "p95": 2.0} if steps else {"p50": None, "p95": None},
        "final": last | {"val_accuracy": None, "test_loss": None, "test_accuracy": None},
        "best": best,
        "best_by": "val_loss",
        "peak_memory_bytes": [5],
        "fingerprint": None,
        "save_dir": "run",
        "resumed_from": "before",
        "faults": [fault],
        "error": "none",
    }


def test_the_score_is_named_where_one_number_alone_is_it() -> None:
    best = {"epoch": 1, "loss": 0.5, "val_loss": 0.5, "val_top1": 0.25, "val_top5": 0.75}
    for score, name in (([-0.5], "val_loss"), ([0.25, 0.75], "val_top1"), ([1.0], None)):
        assert finalize._name_score(best, score) == name
    assert finalize._name_score(best | {"val_top5": 0.25}, [0.25]) is None, "either may be meant"
    assert finalize._name_score({}, []) is None


@pytest.mark.parametrize("board", [True, False])
@pytest.mark.parametrize("ranks", [[], [1, 3]])
@pytest.mark.parametrize(
    ("main", "status"), [(True, "completed"), (True, "stopped"), (False, "completed"), (True, "failed")]
)
def test_rank_0_writes_the_end_of_a_run(
    main: bool, status: str, ranks: list[int], board: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = note_calls(monkeypatch, "_write_summary", "flatten_settings")
    monkeypatch.setattr(finalize, "find_ranks_with_output", lambda logs, size: ranks)
    run.world.is_main, run.folder, run.progress.step, run.moments.end = main, tmp_path, 6, (run.told,)
    run.task.plots.return_value, tables = {"curve.png": b"drawn"}, run.log.tensorboard
    run.log.tensorboard = tables if board else None
    cause = {"cause": "rank 1 failed", "rank": 1} if status == "failed" else {}
    summary = {"status": status, "fingerprint": "f", "final": {"loss": 1.0}} | cause
    finalize.write_run_end(run, summary)
    said = call(f"output of rank 1, 3: {tmp_path}/logs/rank_1.log")
    assert run.log.console.note.mock_calls == [said] * (main and bool(ranks))
    assert run._write_summary.mock_calls == [call(run, summary)] * main
    done = main and status == "completed"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == ({"curve.png": b"drawn"} if done else {})
    settings = call(run.flatten_settings.return_value, {"loss": 1.0})
    assert tables.hyperparameters.mock_calls == [settings] * (done and board)
    run.log.journal.write.assert_called_once_with("end", status=status, step=6, fingerprint="f", **cause)
    assert run.control.summary_written is True
    run.told.assert_called_once_with(run, summary)


def test_a_summary_that_can_not_be_written_hides_no_other_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = note_calls(monkeypatch, "check_owner")
    run.folder = tmp_path
    finalize._write_summary(run, {"status": "completed"})
    assert (tmp_path / "summary.json").read_text() == '{\n "status": "completed"\n}\n'
    run.check_owner.side_effect = OSError("taken")
    with pytest.raises(TrainingError, match="taken"):
        finalize._write_summary(run, {"status": "stopped"})
    run.log.console.warn.assert_not_called()
    finalize._write_summary(run, {"status": "failed"})
    (said,) = run.log.console.warn.call_args.args
    assert "taken" in said


NEW, OWN = b"of the checkpoint", b"of its own state"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("best", "sent", "folder", "left"),
    [
        ({"step": 4}, NEW, {}, {"best.pt": NEW}),
        ({"step": 4}, NEW, {"best.pt": b"later"}, {"best.pt": NEW}),
        ({"step": 6}, NEW, {"best.pt": NEW}, {"best.pt": NEW}),
        ({"step": 6}, None, {"best.pt": b"later"}, {"best.pt": OWN}),
        ({"step": 4}, None, {"best.pt": b"later"}, {"replaced_best.pt": b"later"}),
        ({}, None, {"best.pt": b"later"}, {"replaced_best.pt": b"later"}),
        ({}, None, {}, {}),
    ],
)
def test_the_best_weights_are_those_of_the_checkpoints_past(
    best: dict[str, float],
    sent: bytes | None,
    folder: dict[str, bytes],
    left: dict[str, bytes],
    rank: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Read where the checkpoint is, and written by rank 0."""
    for name, content in folder.items():
        (tmp_path / name).write_bytes(content)
    run, readers = MagicMock(), list[int]()
    run.folder, run.progress = tmp_path, Progress(step=6, best=best, score=[1.0])
    run.spec.resume_point = SimpleNamespace(checkpoint="there", checkpoint_rank=rank)
    run.strategy.gather_state.return_value = {"model": {"w": 1}}
    run.state.eval_weights.return_value = nullcontext(Mock())
    monkeypatch.setattr(finalize, "_read_best", lambda _: readers.append(1) or sent)
    monkeypatch.setattr(finalize, "run_on_main_rank", lambda world, work, by=0: work())
    monkeypatch.setattr(finalize, "save_weights", lambda file, state, *_: file.write_bytes(OWN) and str(state))
    lost = f"the best weights so far, of step {best.get('step')}, are lost: those of the next evaluation replace them"
    there = not best or "best.pt" in left
    assert finalize.restore_best_file(run) == ("" if there else lost)
    assert (run.progress.best, run.progress.score) == ((best, [1.0]) if there else ({}, []))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == left
    if there and best:
        known = sha256(NEW).hexdigest() if sent else "{'w': 1}"
        assert run.checkpointer.best_sha256 == known
    assert readers == [1]
    run.spec.resume_point.checkpoint = None
    assert finalize.restore_best_file(run) == ""
    assert readers == [1], "a new run has none"


def test_a_file_that_is_there_already_is_not_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = note_calls(monkeypatch, "publish", "read_best")
    monkeypatch.setattr(finalize, "run_on_main_rank", lambda world, work: work())
    run.folder, run.progress = tmp_path, Progress(step=6, best={"step": 4})
    (tmp_path / "best.pt").write_bytes(NEW)
    run.read_best.return_value = NEW
    point = SimpleNamespace(checkpoint="run/checkpoints/a", checkpoint_rank=0, manifest={"step": 6})
    run.spec.resume_point = point
    assert finalize.restore_best_file(run) == ""
    run.publish.assert_not_called()
    run.read_best.assert_called_once_with(Path("run/checkpoints/a"), {"step": 6}, 4)
    for without in ({"manifest": None}, {"checkpoint": None}):
        run.spec.resume_point = SimpleNamespace(**vars(point) | without)
        assert finalize._read_best(run) is None
    run.spec.resume_point, run.progress.best = point, {}
    assert finalize._read_best(run) is None
    assert run.read_best.call_count == 1


def test_bytes_go_to_other_ranks_as_a_tensor() -> None:
    assert finalize._to_tensor(None) is None
    sent: Any = finalize._to_tensor(b"\x00\xff")
    assert (sent.dtype, sent.tolist()) == (torch.uint8, [0, 255])
