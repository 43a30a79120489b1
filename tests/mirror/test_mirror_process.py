"""The process that follows a run folder: what it sends, in which order, and what it does while the mirror refuses."""

import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from multigpu_cli.checkpoint import files
from multigpu_cli.mirror import follower as module
from multigpu_cli.mirror.follower import Follower, MirrorState, explain_missing, read_state, write_state
from multigpu_cli.mirror.remote import Mirror, MirrorError
from tests.support.mirrors import read_mirrored_steps, write_checkpoint


class Refusing(Mirror):
    """A mirror that refuses everything at first."""

    refusals = 3

    def list_steps(self) -> list[int]:
        if self.refusals > 0:
            self.refusals -= 1
            raise MirrorError("the server is gone")
        return super().list_steps()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def follower(run: Path, keep: int = 3, name: str = "mirror") -> Follower:
    return Follower(run, Mirror(f"file:{run.parent}/{name}"), keep)


def end() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


def test_the_newest_is_sent_first_and_the_oldest_leave(run: Path) -> None:
    found, mirror = follower(run, keep=2), run.parent / "mirror"
    for step in (1, 2):
        write_checkpoint(run, step)
    found.upload_new()
    assert read_mirrored_steps(mirror) == [2]
    for step in (3, 4):
        write_checkpoint(run, step)
        found.upload_new()
    assert read_mirrored_steps(mirror) == [3, 4]
    assert (read_state(run).step, read_state(run).complete) == (4, False)
    write_checkpoint(run, 4, content=b"the same step once more")
    found.upload_new()
    assert (mirror / "checkpoints/step_00000004/state.pt").read_bytes() == b"the same step once more"


def test_at_the_end_the_weights_follow(run: Path) -> None:
    write_checkpoint(run, 1)
    for name in ("best.pt", "journal.jsonl"):
        (run / name).write_text(name)
    assert follower(run).follow(end())
    mirror = run.parent / "mirror"
    assert {file.name for file in mirror.iterdir()} == {"checkpoints", "best.pt", "journal.jsonl", "run.json"}
    assert read_state(run).complete


def test_what_was_sent_is_not_sent_again_by_the_next_attempt(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        write_checkpoint(run, step)
        follower(run).upload_new()
    monkeypatch.setattr(Mirror, "upload_checkpoint", lambda *_: pytest.fail("sent again"))
    follower(run).upload_new()
    assert read_mirrored_steps(run.parent / "mirror") == [1, 2]


def test_a_mirror_that_refuses_is_tried_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float, str, bool]] = []
    monkeypatch.setattr(time, "sleep", lambda s: seen.append((s, read_state(run).error, read_state(run).complete)))
    write_checkpoint(run, 1)
    write_state(run, MirrorState(complete=True))  # that of an earlier attempt
    assert Follower(run, Refusing(f"file:{run.parent}/mirror"), 3).follow(end())
    assert seen == [(seconds, "the server is gone", False) for seconds in (2.0, 4.0, 6.0)]
    assert (read_state(run).error, read_mirrored_steps(run.parent / "mirror")) == ("", [1])


def test_the_pauses_of_a_run_grow_while_the_mirror_refuses_and_are_short_again_after_that(run: Path) -> None:
    waits: list[float] = []

    class Ended:
        def wait(self, pause: float) -> bool:
            waits.append(pause)
            return len(waits) == 9

    write_checkpoint(run, 1)
    mirror, ended = Refusing(f"file:{run.parent}/mirror"), cast(threading.Event, Ended())
    mirror.refusals = 6
    assert Follower(run, mirror, 3).follow(ended)
    assert waits == [1, 2, 4, 8, 16, 30, 30, 1, 1]


def test_it_gives_up_when_nothing_moves(run: Path) -> None:
    write_checkpoint(run, 1)
    mirror = Refusing(f"file:{run.parent}/mirror")
    mirror.refusals = 10**9
    assert not Follower(run, mirror, 3).follow(end(), patience=0.05)
    assert read_state(run).error == "the server is gone"


def test_a_damaged_checkpoint_is_left_out_and_read_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(run, 1)
    (write_checkpoint(run, 2) / "state.pt").write_bytes(b"torn")
    found = follower(run)
    found.upload_new()
    assert read_mirrored_steps(run.parent / "mirror") == [1]
    monkeypatch.setattr(module, "find_damage", None)
    found.upload_new()


def test_a_run_that_went_back_takes_its_mirror_along(run: Path) -> None:
    for step in (1, 2, 3):
        write_checkpoint(run, step)
        follower(run).upload_new()
    for step in (2, 3):
        shutil.rmtree(run / "checkpoints" / f"step_0000000{step}")
    found = follower(run)
    found.upload_new()
    assert read_mirrored_steps(run.parent / "mirror") == [1]
    write_checkpoint(run, 2, content=b"another path")
    found.upload_new()
    assert read_mirrored_steps(run.parent / "mirror") == [1, 2]


def test_a_mirror_of_another_run_is_left_as_it_is(run: Path) -> None:
    write_checkpoint(run, 7)
    follower(run).upload_new()
    other = run.parent / "other"
    write_checkpoint(other, 1)
    follower(other, name="elsewhere").upload_new()  # so it has an id of its own
    (run.parent / "empty").mkdir()
    shutil.rmtree(run / "checkpoints")  # so what is there may be of this run, or not
    for folder in (other, run.parent / "empty", run):
        with pytest.raises(MirrorError, match="holds checkpoints of another run"):
            follower(folder).upload_new()
    assert read_mirrored_steps(run.parent / "mirror") == [7]


def test_what_a_mirror_lacks_is_told(run: Path) -> None:
    def told(url: str, step: int | None) -> str:
        write_state(run, MirrorState(url=url, step=step))
        return explain_missing(run, "file:/m", "no route")

    last = f"file:/m lacks the last files of the run (no route); {run} has all of it; multigpu mirror {run} --to "
    assert told("file:/m", None) == f"{last}file:/m sends it", "there is no checkpoint"
    write_checkpoint(run, 3)
    newest = last.replace("last files of the run", "checkpoint of step 3")
    assert told("file:/m", 3) == f"{last}file:/m sends it"
    assert told("file:/m", 2) == told("file:/other", 3) == f"{newest}file:/m sends it"


def test_a_checkpoint_that_is_removed_before_it_is_sent_is_no_error(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, send = write_checkpoint(run, 1), Mirror.upload_checkpoint

    def remove_then_send(mirror: Mirror, *arguments: Any) -> None:
        shutil.rmtree(folder)
        write_checkpoint(run, 2)
        monkeypatch.setattr(Mirror, "upload_checkpoint", send)
        send(mirror, *arguments)

    found = follower(run)
    monkeypatch.setattr(Mirror, "upload_checkpoint", remove_then_send)
    found.upload_new()
    assert read_mirrored_steps(run.parent / "mirror") == []
    found.upload_new()
    assert read_mirrored_steps(run.parent / "mirror") == [2]


def test_of_two_runs_that_begin_with_one_mirror_only_the_last_to_claim_it_sends(run: Path) -> None:
    other = run.parent / "other"
    other.mkdir()
    first, second = follower(run), follower(other)
    for each in (first, second):
        each.upload_new()  # before either has a checkpoint
    write_checkpoint(run, 1)
    with pytest.raises(MirrorError, match="holds checkpoints of another run"):
        first.upload_new()
    write_checkpoint(other, 2)
    second.upload_new()
    assert read_mirrored_steps(run.parent / "mirror") == [2]


def test_a_full_disk_of_the_run_ends_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    write_checkpoint(run, 1)
    monkeypatch.setattr(module, "write_state", refuse)
    found = Follower(run, Mirror(f"file:{run.parent}/mirror"), 3, notes.append)
    assert not found.follow(end(), patience=0.05)
    assert notes[:2] == ["", "[Errno 28] No space left on device"], "a sign of life, then what is wrong"


def test_a_process_that_holds_the_lock_is_waited_for_while_it_moves(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes a second with each look; the other one moves five times, and then hangs."""
    now, notes = [0.0], list[str]()

    def sleep(_: float) -> None:
        now[0] += 1
        if now[0] <= 5:
            os.utime(run / ".mirror.lock", (now[0], now[0]))

    with module.lock_mirror(run):
        for each in (module, files):
            monkeypatch.setattr(each, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
        monkeypatch.setattr(module, "serve", lambda: (end(), notes.append))
        with pytest.raises(SystemExit, match="1"):
            module.main([str(run), f"file:{run.parent}/mirror", "3", "2"])
    busy = f"process {os.getpid()} on {os.uname().nodename} still sends this run"
    assert notes == [busy] * 6 + [f"{busy}, and has not moved for 2 s"]
    assert now == [8.0], "three seconds after it moved last"


def test_who_sends_moves_the_lock(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(run, 1)
    with module.lock_mirror(run):
        pass  # what it wrote is not left before what the next one writes
    times: list[float] = []

    def note(text: str) -> None:
        times.append((run / ".mirror.lock").stat().st_mtime)
        os.utime(run / ".mirror.lock", (1.0, 1.0))

    monkeypatch.setattr(module, "serve", lambda: (end(), note))
    with pytest.raises(SystemExit, match="0"):
        module.main([str(run), f"file:{run.parent}/mirror", "3", "2"])
    assert len(times) > 2, "with each piece of a file, too"
    assert min(times) > 1.0
    assert (run / ".mirror.lock").read_text() == f"{os.getpid()} on {os.uname().nodename}"
    monkeypatch.setattr(Follower, "follow", lambda *_: False)
    with pytest.raises(SystemExit, match="1"):
        module.main([str(run), f"file:{run.parent}/mirror", "3", "2"])
