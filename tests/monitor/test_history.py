import os
from pathlib import Path
from typing import Any

import pytest

from multigpu_cli.monitor.history import History, find_run_folders, load_history


def at(time: float, event: str, **fields: Any) -> dict[str, Any]:
    return {"event": event, "time": time} | fields


FIRST = [
    at(0, "start", plan={"total_steps": 8}, resumed_from=None),
    at(1, "train", step=2, loss=2.0),
    at(2, "eval", step=2, split="val", loss=2.5),
    at(3, "checkpoint", step=2),
    at(9, "train", step=4, loss=9.0),
    at(9, "fault", kind="nonfinite", action="skipped", step=4),
]
AGAIN = [
    at(20, "start", plan={"total_steps": 8}, resumed_from="…/step_00000002"),
    at(20, "resume", step=2, from_world_size=2, world_size=1),
    at(21, "train", step=3, loss=1.5),
    at(22, "end", status="stopped", step=3),
]


def test_after_a_resume_only_what_counts_is_left() -> None:
    found = History().follow(FIRST + AGAIN)
    assert {step: event["loss"] for step, event in found.train.items()} == {2: 2.0, 3: 1.5}
    assert list(found.evals) == [(2, "val")]
    assert (found.step, len(found.checkpoints), len(found.faults)) == (3, 1, 1)
    first, second = found.attempts
    assert (first.end, first.last, first.longest_silence) == (None, 9, 6)
    assert (second.resumed_at, second.last) == (2, 22)
    assert second.end is not None


def test_steps_that_a_task_left_out_are_done_but_not_taken() -> None:
    assert History().follow(FIRST).steps_taken == History().follow(FIRST).step == 4
    found = History().follow([*FIRST, at(10, "train", step=8, steps_taken=5, loss=1.0)])
    assert (found.step, found.steps_taken) == (8, 5)


def test_a_run_that_begins_anew_forgets_what_was() -> None:
    found = History().follow([*FIRST, at(20, "start", plan={}, resumed_from=None)])
    assert (found.train, found.evals, found.step) == ({}, {}, 0)


def test_right_after_a_resume_its_step_is_known() -> None:
    assert History().follow(FIRST + AGAIN[:2]).step == 2


def test_runs_are_found_by_their_journals(tmp_path: Path) -> None:
    for place in ("a/one", "b", "c/d/too-deep"):
        folder = tmp_path / place
        folder.mkdir(parents=True)
        (folder / "journal.jsonl").write_text('{"event": "start", "time": 5.0}\n')
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe/journal.jsonl")  # whoever opens it waits
    with pytest.warns(UserWarning, match=r"pipe/journal\.jsonl is damaged, and not used: not a regular file"):
        runs = set(find_run_folders(tmp_path))
    assert runs == {tmp_path / "a/one", tmp_path / "b"}
    assert find_run_folders(tmp_path / "b") == [tmp_path / "b"]
    assert load_history(tmp_path / "b").attempts[0].last == 5.0
    with pytest.raises(FileNotFoundError):
        load_history(tmp_path)


def test_the_mean_loss_of_an_older_journal_is_that_of_its_steps() -> None:
    found = History().follow(
        [*FIRST[:1], at(1, "train", step=1, loss=3.0), at(2, "train", step=2, loss=2.0, mean_loss=2.5)]
    )
    assert [event["mean_loss"] for event in found.train.values()] == [3.0, 2.5]
