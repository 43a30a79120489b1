"""What the next attempt finds of the one before, and what it journals of the gap."""

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from multigpu_cli.checkpoint.manifest import BEST, MANIFEST, read_manifest, sign_manifest
from multigpu_cli.checkpoint.store import Store
from multigpu_cli.checkpoint.weights import fingerprint
from multigpu_cli.commands.clean import list_checkpoints
from multigpu_cli.distributed.launch_env import PreviousAttempt
from multigpu_cli.distributed.world import World
from multigpu_cli.monitor import journal
from multigpu_cli.run.finalize import restore_best_file
from multigpu_cli.run.train_log import log_recovery
from tests.support.ranks import run_on_each_rank
from tests.support.run_training import Ended, run_training

pytestmark = pytest.mark.usefixtures("in_tmp_path")
RUN: dict[str, Any] = {
    "global_batch_size": 20, "batch_size": 5, "epochs": 3, "checkpoint_every": "1000", "save_dir": "run",
}  # fmt: skip


def events(kind: str) -> list[dict[str, Any]]:
    return [event for event in journal.read_events("run/journal.jsonl") if event["event"] == kind]


def test_after_a_stop_nothing_is_done_again_and_the_gap_is_journalled(tmp_path: Path) -> None:
    agent = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_ERROR_FILE": str(tmp_path / "attempt_0" / "0" / "error.json")}
    stopped = run_training(2, **RUN, environ=agent | {"OWN_DEED": "1:4:SIGTERM", "OWN_PAUSE": "0.05"})
    assert stopped.summary["status"] == "stopped"
    assert events("recovery") == []
    ended = run_training(2, **RUN, environ=agent)  # the agent does not count an attempt that a new node caused
    assert ended.summary["status"] == "completed"
    [found] = events("recovery")
    assert (found["step"], found["lost_steps"]) == (stopped.summary["steps"] + 1, 0)
    assert found["cause"] == f"stopped in good order at step {stopped.summary['steps']}"
    assert 0 < found["seconds"] < 60
    [fault] = events("fault")
    assert fault["action"].startswith("attempt 2 of this launch: stopped in good order")


@pytest.mark.parametrize(
    ("last", "first", "lost"), [(12, 11, "2 steps"), (12, 13, "0 steps"), (None, 1, "0 steps"), (0, 1, "0 steps")]
)
@pytest.mark.parametrize("age", [8.0, -8.0], ids=["", "another clock"])
def test_steps_that_are_done_again_are_counted_once(
    last: int | None, first: int, lost: str, age: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    run = Mock(progress=SimpleNamespace(step=first))
    run.control.previous_attempt = PreviousAttempt("killed", last, 1000.0 - age)
    log_recovery(run)
    log_recovery(run)
    seconds = max(0.0, age)
    run.log.journal.write.assert_called_once_with(
        "recovery", step=first, seconds=seconds, lost_steps=int(lost[0]), cause="killed"
    )
    run.log.console.note.assert_called_once_with(f"recovered in {seconds} s, {lost} repeated")


# -- after a resume and at the end best.pt's step equals progress.best.step

SCORED: dict[str, Any] = {
    "save_dir": "run", "batch_size": 10, "epochs": 4, "keep": "9", "log_interval": 1,
    "task": "tests.support.scripted_task:Planned",
}  # fmt: skip
RISING = [0.1, 0.2, 0.3, 0.4]
FIRST_PASS = {"OWN_DEED": "0:2:SIGKILL"}  # the first one is the rehearsal's


def run_with_scores(scores: list[float], workers: int = 1, /, **flags: Any) -> Ended:
    """A run whose evaluations, from where it begins, have these scores; an epoch has six steps, and a checkpoint."""
    Path("scores.json").write_text(json.dumps(scores))
    environ = flags.pop("environ", None)
    return run_training(workers, **SCORED | flags, environ=environ)


def best_step(run: str = "run") -> int | None:
    """The step of the weights in best.pt; None where it is not there."""
    file = Path(run, "best.pt")
    return torch.load(file, weights_only=True)["metrics"]["step"] if file.exists() else None


def read_recorded_step(run: str = "run") -> int | None:
    """The step of the best weights as the newest checkpoint says."""
    newest, _ = Store(Path(run, "checkpoints"), 9).find_newest()
    return newest.state()["progress"]["best"].get("step") if newest else None


def weights_of(file: str) -> str:
    return fingerprint(torch.load(file, weights_only=True)["model"])


def test_a_fork_has_the_best_weights_of_its_own_past() -> None:
    run_with_scores(RISING)
    assert best_step() == 24
    place = {"save_dir": "fork", "resume": "run/checkpoints/step_00000012"}
    assert run_with_scores([0.0, 0.0], **place, environ=FIRST_PASS).killed == [0]
    assert best_step("fork") == 12
    ended = run_with_scores([0.0, 0.0], **place)
    assert (ended.summary["best"]["step"], best_step("fork")) == (12, 12)
    assert weights_of("fork/best.pt") == weights_of("run/checkpoints/step_00000012/state.pt")


def test_the_node_that_has_the_checkpoint_sends_its_best_weights_to_the_first() -> None:
    run_with_scores([0.1, 0.4, 0.3, 0.2])
    path = Path("run/checkpoints/step_00000024")
    start = SimpleNamespace(checkpoint=str(path), checkpoint_rank=1, manifest=read_manifest(path))

    def work(world: World) -> str:
        folder = Path(f"node_{world.rank}")
        folder.mkdir()
        run: Any = SimpleNamespace(
            world=world,
            spec=SimpleNamespace(resume_point=start),
            progress=SimpleNamespace(best={"step": 12}, step=24),
            folder=folder,
            checkpointer=SimpleNamespace(best_sha256=""),
        )
        return restore_best_file(run)

    assert run_on_each_rank(2, work) == ["", ""]
    assert (best_step("node_0"), best_step("node_1")) == (12, None), "the first one writes it"
    assert weights_of("node_0/best.pt") == weights_of("run/best.pt")


@pytest.mark.parametrize("scores", [[0.0, 0.0], [0.25, 0.0]], ids=["nothing better", "better than what it knew"])
def test_a_run_that_begins_again_forgets_a_best_that_came_later(scores: list[float]) -> None:
    run_with_scores(RISING)
    again = {"save_dir": None, "resume": "run/checkpoints/step_00000012"}
    assert run_with_scores(scores, **again, environ=FIRST_PASS).killed == [0]
    assert best_step() == read_recorded_step() == 12
    ended = run_with_scores(scores, **again)
    assert best_step() == ended.summary["best"]["step"] == (18 if scores[0] else 12)


def test_a_run_that_begins_again_before_any_evaluation_has_no_best_yet() -> None:
    run_with_scores([0.9, 0.1, 0.1, 0.1], checkpoint_every="3")
    again = {"save_dir": None, "resume": "run/checkpoints/step_00000003", "checkpoint_every": "3"}
    assert run_with_scores(RISING, **again, environ=FIRST_PASS).killed == [0]
    assert best_step() is None
    assert torch.load("run/replaced_best.pt", weights_only=True)["metrics"]["step"] == 6
    assert run_with_scores(RISING, **again).summary["best"]["step"] == best_step() == 24


@pytest.mark.parametrize(
    ("workers", "when"),
    [
        (1, "before"),
        (2, "after"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, "after"), (2, "before"))),
    ],
)
def test_a_kill_beside_a_checkpoint_changes_no_best(when: str, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same scores; best.pt is never behind the newest checkpoint, and after the resume not ahead either."""
    flags = {"global_batch_size": 10, "batch_size": 5, "exact": True}
    scores = [0.1, 0.4, 0.3, 0.2]
    undisturbed = run_with_scores(scores, workers, **flags, save_dir="whole").summary
    with monkeypatch.context() as patch:
        save = Store.save

        def killed(self: Store, step: int, *args: Any) -> int:
            size = save(self, step, *args) if step < 12 or when == "after" else 0
            return size if step < 12 else os.kill(os.getpid(), signal.SIGKILL) or size

        patch.setattr(Store, "save", killed)
        assert 0 in run_with_scores(scores, workers, **flags).killed
    assert (best_step(), read_recorded_step()) == (6, 6), "the evaluation comes after the checkpoint"
    left = scores[1:]
    assert 0 in run_with_scores(left, workers, **flags, environ=FIRST_PASS).killed
    assert best_step() == read_recorded_step()
    ended = run_with_scores(left, workers, **flags).summary
    assert ended["best"] == undisturbed["best"]
    assert weights_of("run/best.pt") == weights_of("whole/best.pt")


def test_an_older_checkpoint_in_place_of_a_damaged_one_has_its_own_best() -> None:
    run_with_scores(RISING)
    Path("run/summary.json").unlink()
    for step in (18, 24):
        Path(f"run/checkpoints/step_{step:08d}/state.pt").write_bytes(b"torn")
    ended = run_with_scores([0.0, 0.0])
    assert (ended.summary["best"]["step"], best_step()) == (12, 12)
    assert weights_of("run/best.pt") == weights_of("run/checkpoints/step_00000012/state.pt")


def test_on_disks_of_their_own_too_the_best_is_of_the_past_of_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 1 has trained alone, and goes back with rank 0 on a node that has nothing yet."""
    flags = {"global_batch_size": 10, "batch_size": 5}
    for node in ("node0", "node1"):
        Path(node).mkdir()
    with monkeypatch.context() as patch:
        patch.chdir("node1")
        run_with_scores(RISING, **flags)
    for node in ("node0", "node1"):
        Path(node, "scores.json").write_text(json.dumps([0.0, 0.0]))
    again = SCORED | flags | {"save_dir": None, "resume": "run/checkpoints/step_00000012"}
    assert 0 in run_training(2, **again, apart=True, environ=FIRST_PASS).killed
    assert best_step("node0/run") == 12
    ended = run_training(2, **again, apart=True)
    assert ended.summary["best"]["step"] == best_step("node0/run") == 12


def test_whoever_writes_into_best_pt_harms_neither_the_checkpoints_nor_the_end() -> None:
    run_with_scores([0.4, 0.1], epochs=2)
    true = Path("run/best.pt").read_bytes()
    with open("run/best.pt", "r+b") as file:
        file.write(b"mine")
    assert {entry.name: entry.state for entry in list_checkpoints(Path("run"))}["checkpoints/step_00000012"] == "whole"
    assert run_with_scores([0.1, 0.1]).summary["best"]["step"] == best_step() == 6
    assert Path("run/best.pt").read_bytes() == true


def test_one_file_serves_all_checkpoints_that_count_on_it() -> None:
    run_with_scores([0.1, 0.3, 0.2, 0.2], keep="3")
    kept = sorted(Path("run/checkpoints").glob(f"step_*/{BEST}"))
    assert len(kept) == 3
    assert len({file.stat().st_ino for file in [*kept, Path("run/best.pt")]}) == 2
    assert {file.read_bytes() for file in kept} == {Path("run/best.pt").read_bytes()}


def old_checkpoints() -> None:
    """As a version before has left them."""
    for folder in Path("run/checkpoints").iterdir():
        (folder / BEST).unlink()
        manifest = read_manifest(folder)
        del manifest["best"], manifest["sha256"]
        (folder / MANIFEST).write_bytes(sign_manifest(manifest))


@pytest.mark.parametrize(
    ("scores", "best", "told"),
    [
        ([0.4, 0.1, 0.1, 0.1], 6, ""),
        ([0.1, 0.4, 0.1, 0.5], 12, ""),
        ([0.4, 0.1, 0.1, 0.5], 18, "the best weights so far, of step 6, are lost"),
    ],
    ids=["best.pt is it", "its own state is it", "gone"],
)
def test_checkpoints_of_before_still_have_their_best_where_it_can_be_found(
    scores: list[float], best: int, told: str
) -> None:
    run_with_scores(scores)
    old_checkpoints()
    ended = run_with_scores([0.05, 0.0], save_dir=None, resume="run/checkpoints/step_00000012")
    assert (ended.summary["best"]["step"], best_step()) == (best, best)
    assert [told in event["action"] for event in events("fault")] == ([True] if told else [])
