"""--mirror: a run whose folder is gone goes on from it, on another number of workers, with the same bits."""

import fcntl
import os
import shutil
import signal
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from threading import Timer
from typing import Any
from unittest.mock import Mock

import pytest

from multigpu_cli.checkpoint import files
from multigpu_cli.config.sources import resolve
from multigpu_cli.errors import RequestError
from multigpu_cli.faults.watchdog import Watchdog
from multigpu_cli.mirror import part, remote, restore
from multigpu_cli.mirror.follower import MirrorState, lock_mirror, read_state, write_state
from multigpu_cli.mirror.part import MirrorProcess
from multigpu_cli.mirror.remote import OWNER, Mirror, MirrorError
from multigpu_cli.monitor import journal
from tests.support.die_at_third_checkpoint import die_at_third_checkpoint
from tests.support.mirrors import read_mirrored_steps, s3_server, write_checkpoint
from tests.support.run_training import run_training
from tests.support.wait_until import wait_until
from train_multi_gpu import train

pytestmark = pytest.mark.usefixtures("in_tmp_path")
RUN: dict[str, Any] = {
    "epochs": 3, "batch_size": 4, "global_batch_size": 16, "log_interval": 1, "checkpoint_every": "2", "exact": True,
    "mirror": "file:mirror", "save_dir": "run",
}  # fmt: skip


def wait_for_mirror(run: str) -> None:
    """Until the process of a killed run has sent what there was."""
    wait_until(lambda: read_state(Path(run)).complete, "all is in the mirror")
    with lock_mirror(Path(run)):
        return


def lose(run: str) -> None:
    """Remove a run folder, into which the process of the killed run may just write its last note."""

    def is_gone() -> bool:
        shutil.rmtree(run, ignore_errors=True)
        return not Path(run).exists()

    wait_until(is_gone, "the run folder is gone")


def test_killed_on_two_workers_and_resumed_on_one_from_an_s3_server() -> None:
    whole = run_training(1, **RUN | {"mirror": None, "save_dir": "whole"})
    with s3_server() as bucket:
        flags = RUN | {"mirror": f"s3://{bucket}/run"}
        assert 0 in run_training(2, **flags, prepare=die_at_third_checkpoint).killed
        wait_for_mirror("run")
        lose("run")
        resumed = run_training(1, **flags)
    assert resumed.error == ""
    assert resumed.summary["fingerprint"] == whole.summary["fingerprint"]
    kinds = [event["event"] for event in journal.read_events("run/journal.jsonl")]
    assert kinds.count("start") == 2, "the journal came back too"
    assert "resume" in kinds


def test_a_completed_run_leaves_a_whole_copy_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    assert run_training(1, **RUN).error == ""
    names = {str(file.relative_to("mirror")) for file in Path("mirror").rglob("*") if file.is_file()}
    assert {"best.pt", "last.pt", "summary.json", "journal.jsonl", "config.yaml"} < names
    assert not [file for file in Path().rglob("*") if file.is_file() and b"hush" in file.read_bytes()]
    shutil.rmtree("run")
    again = run_training(1, **RUN)
    assert again.summary["status"] == "completed", "it is complete, and nothing is trained again"
    assert Path("run/best.pt").exists()


def test_a_mirror_that_fails_is_said_and_keeps_no_run_from_its_end(capfd: pytest.CaptureFixture[str]) -> None:
    def break_mirror() -> None:
        from multigpu_cli.mirror import follower as mirror_process

        mirror_process.__name__ = "tests.support.no_such_module"
        begin = MirrorProcess.__init__

        def begin_and_fail(mirror: MirrorProcess, *arguments: Any) -> None:
            begin(mirror, *arguments)
            mirror._companion.process.wait()

        MirrorProcess.__init__ = begin_and_fail  # type: ignore[method-assign,assignment]

    ended = run_training(1, **RUN, prepare=break_mirror)
    assert ended.error == ""
    [fault] = ended.summary["faults"]
    assert fault["kind"] == "mirror", "said once, not with each checkpoint"
    assert "training continues, but file:" in fault["action"]
    assert "(its process ended with exit code 1: " in fault["action"]
    assert ended.summary["status"] == "completed"
    assert "mirror lacks the checkpoint of step" in capfd.readouterr().out
    assert "no_such_module" in Path("run/logs/mirror.log").read_text()


def test_a_mirror_that_hangs_keeps_no_run_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process stands for one that waits for a network's file system whose server is gone."""
    write_checkpoint(Path("run"), 3)
    monkeypatch.setattr(part, "_HANGS", 2.0)
    monkeypatch.setattr(part, "_SILENT", 0.5)
    said, moves = list[tuple[str, bool]](), list[int]()
    mirror = MirrorProcess(Path("run"), "file:mirror", 3)
    os.kill(mirror._companion.process.pid, signal.SIGSTOP)
    missing = mirror.finish(lambda: False, lambda: moves.append(0), lambda text: said.append((text, len(moves) > 1)))
    assert len(moves) > 1, "that the run waits for it is no hang of the run"
    here = Path.cwd()
    assert missing == (
        f"file:{here}/mirror lacks the checkpoint of step 3 (it has not answered for 2 s); {here}/run has all of it; "
        f"multigpu mirror {here}/run --to file:{here}/mirror sends it"
    )
    waits = f"the training is done; waiting until all is in file:{here}/mirror (Ctrl-C: at most 10 s)"
    assert said == [(waits, True)], "not at once"
    cause = "it has not answered for 2 s; training continues, and the copy is tried again"
    assert [mirror.read_new_fault(), mirror.read_new_fault()] == [cause, ""]
    mirror._companion.process.kill()


@pytest.mark.parametrize("let_go", [True, False])
def test_the_process_of_a_killed_attempt_is_waited_for(let_go: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock is let go of once the run waits at its end, or never: then it is named, and the new process ends."""
    write_checkpoint(Path("run"), 3)
    monkeypatch.setattr(part, "_SILENT", 0.0)
    monkeypatch.setattr(part, "_STOP_WAIT", 0.0)  # nobody stops it
    with ExitStack() as killed, monkeypatch.context() as patch:
        killed.enter_context(lock_mirror(Path("run")))
        patch.setattr(part, "_HANGS", 60.0 if let_go else 1.0)
        mirror = MirrorProcess(Path("run"), "file:mirror", 3)
        patch.undo()
        wait_until(lambda: (mirror.read_new_fault(), mirror._note)[1] != "", "the new process has seen the lock")
        missing = mirror.finish(lambda: False, lambda: None, lambda text: killed.close() if let_go else None)
    here, node = Path.cwd(), os.uname().nodename
    told = (
        f"file:{here}/mirror lacks the checkpoint of step 3 (process {os.getpid()} on {node} still sends this run, and "
        f"has not moved for 1 s); {here}/run has all of it; multigpu mirror {here}/run --to file:{here}/mirror sends it"
    )
    assert missing == ("" if let_go else told)
    assert read_state(Path("run")).complete == let_go
    assert mirror._companion.process.wait(10) == (0 if let_go else 1)


def test_after_a_kill_nothing_is_left_to_send_by_hand() -> None:
    """The mirror's lock is held by somebody until the resumed run waits at its end for what its own process sends."""
    Path("run").mkdir()
    with open("run/.mirror.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def let_go() -> None:
            finish = MirrorProcess.finish

            def finish_late(*arguments: Any, **named: Any) -> str:
                fcntl.flock(lock, fcntl.LOCK_UN)
                return finish(*arguments, **named)

            MirrorProcess.finish = finish_late  # type: ignore[method-assign]

        assert 0 in run_training(1, **RUN, prepare=die_at_third_checkpoint).killed
        assert read_mirrored_steps(Path("mirror")) == []
        assert run_training(1, **RUN, prepare=let_go).error == ""
    wait_for_mirror("run")  # the killed run's process may still look whether anything is left
    steps = sorted(path.name for path in Path("run/checkpoints").glob("step_*"))
    assert [f"step_{step:08}" for step in read_mirrored_steps(Path("mirror"))][-1] == steps[-1]
    assert Path("mirror/best.pt").read_bytes() == Path("run/best.pt").read_bytes()
    assert not [event for event in journal.read_events("run/journal.jsonl") if event["event"] == "fault"]


@pytest.mark.parametrize(("stopped", "wait"), [(True, True), (False, False)])
def test_after_a_signal_or_a_failure_it_goes_on_alone(
    stopped: bool, wait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(Path("run"), 3)
    monkeypatch.setattr(part, "_STOP_WAIT", 0.0)
    mirror = MirrorProcess(Path("run"), "file:mirror", 3)
    missing = mirror.finish(lambda: stopped, lambda: None, print, wait=wait)
    assert "is not complete yet: process " in missing
    wait_for_mirror("run")
    assert read_mirrored_steps(Path("mirror")) == [3]


def test_no_signal_ends_it_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a run that is stopped waits for what is soon sent."""
    monkeypatch.setattr(part, "_STOP_WAIT", 600.0)
    write_checkpoint(Path("run"), 3)
    mirror = MirrorProcess(Path("run"), "file:mirror", 3)
    wait_until(lambda: read_state(Path("run")).step == 3, "step 3 is in the mirror")
    os.kill(mirror._companion.process.pid, signal.SIGTERM)  # as a job's manager does to all processes
    write_checkpoint(Path("run"), 4)
    assert mirror.finish(lambda: True, lambda: None, print) == ""
    assert read_mirrored_steps(Path("mirror")) == [3, 4]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"resume": "never"}, "--resume never, but file:{here}/mirror already holds a run"),
        ({"mirror": "file:/proc/mirror"}, "mirror file:/proc/mirror: writing run.json failed"),
    ],
)
def test_what_is_refused_leaves_no_folder(flags: dict[str, Any], told: str, tmp_path: Path) -> None:
    write_checkpoint(Path("mirror"), 3)
    Path("mirror/run.json").write_text('{"id": "other"}')
    ended = run_training(1, **RUN | flags)
    assert ended.kind == "RequestError"
    assert told.format(here=tmp_path) in ended.error
    assert not Path("run").exists()
    assert read_mirrored_steps(Path("mirror")) == [3]


def test_another_run_with_the_same_mirror_is_refused_and_the_mirror_stays(tmp_path: Path) -> None:
    assert run_training(1, **RUN).error == ""
    before = {file: file.read_bytes() for file in Path("mirror").rglob("*") if file.is_file()}
    ended = run_training(1, **RUN | {"save_dir": "other", "lr": 0.5})
    assert ended.kind == "RequestError"
    assert "--mirror holds another run: --lr 0.5 differs from 0.000707107, with which file:" in ended.error
    assert not Path("other").exists()
    again = run_training(1, **RUN | {"save_dir": None})
    assert (again.error, again.summary["steps"]) == ("", 12), "the same command finds the run that is complete"
    assert [path.name for path in Path("checkpoints").iterdir()] == [Path(again.summary["save_dir"]).parent.name]
    assert {file: file.read_bytes() for file in Path("mirror").rglob("*") if file.is_file()} == before


def test_a_run_that_was_made_longer_goes_on_from_its_mirror(monkeypatch: pytest.MonkeyPatch) -> None:
    """The summary of the shorter run must not stay there: with it, the longer one would count as complete."""
    assert run_training(1, **RUN | {"epochs": 1}).error == ""
    assert 0 in run_training(1, **RUN, prepare=die_at_third_checkpoint).killed
    wait_for_mirror("run")
    lose("run")
    resumed = run_training(1, **RUN, prepare=require_watchdog)
    assert (resumed.error, resumed.summary["steps"]) == ("", 12)
    assert resumed.summary["resumed_from"]


def require_watchdog() -> None:
    """In the process that trains: what is copied back must be progress for the watchdog."""
    download = Mirror.download_checkpoint

    def check_and_download(mirror: Mirror, step: int, run: Path, moved: files.Moved) -> None:
        assert isinstance(getattr(moved, "__self__", None), Watchdog)
        download(mirror, step, run, moved)

    Mirror.download_checkpoint = check_and_download  # type: ignore[method-assign,assignment]


def test_a_mirror_that_breaks_off_keeps_a_run_from_beginning_at_an_older_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mirror = Mirror("file:mirror")
    mirror.write_owner("a run")
    for step in (2, 3):
        mirror.upload_checkpoint(write_checkpoint(Path("made"), step), lambda: None)
    config = resolve({"mirror": "file:mirror", "save_dir": "run"}, [], None)
    monkeypatch.setattr(restore, "_check_settings", lambda *_: None)
    with monkeypatch.context() as full:
        full.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(RequestError, match=r"could not be copied to run: the disk is full\n.*free some space"):
            restore.restore_from_mirror(config, attempt=0, begun=[])
    with monkeypatch.context() as broken:
        broken.setattr(remote, "open_regular", CutFile)
        with pytest.raises(RequestError, match=r"the network is gone\)\n.*check the URL"):
            restore.restore_from_mirror(config, attempt=0, begun=[])
    assert not Path("run").exists()
    Path("mirror/checkpoints/step_00000003/state.pt").write_bytes(b"torn")
    notes: list[str] = []
    folder, skipped = restore.restore_from_mirror(config, attempt=0, begun=[], note=notes.append)
    assert (folder, read_state(Path("run")).id) == ("run", "a run")
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["step_00000002"]
    assert "step_00000003 is damaged" in skipped[0]
    assert notes[-1] == f"copying step 2 (0.0 MiB) from file:{tmp_path}/mirror to run"


def test_where_the_newer_checkpoint_is_damaged_there_none_that_the_run_has_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for step in (2, 3, 4):
        Mirror("file:mirror").upload_checkpoint(write_checkpoint(Path("run"), step), lambda: None)
    Mirror("file:mirror").write_owner("a run")
    write_state(Path("run"), MirrorState(id="a run"))
    shutil.rmtree("run/checkpoints/step_00000004")
    Path("mirror/checkpoints/step_00000004/state.pt").write_bytes(b"torn")
    config, notes = resolve({"mirror": "file:mirror", "save_dir": "run"}, [], None), list[str]()
    timers: list[Timer] = []
    monkeypatch.setattr(restore, "Timer", lambda *given: timers.append(Timer(*given)) or timers[-1])
    folder, skipped = restore.restore_from_mirror(config, attempt=0, begun=[], note=notes.append)
    assert (folder, len(skipped)) == ("", 1)
    assert [note.partition(" (")[0] for note in notes] == ["copying step 4"]
    assert [timer.finished.is_set() for timer in timers] == [True]
    monkeypatch.setattr(Mirror, "list_steps", Mock(side_effect=MirrorError("the server is gone")))
    assert restore.restore_from_mirror(config, attempt=0, begun=[]) == ("", []), "it has a checkpoint of its own"


@pytest.mark.parametrize("known", ["id", "checkpoints", "place"])
def test_checkpoints_of_another_run_are_not_those_of_a_folder_that_has_its_own(known: str) -> None:
    """Or an id of its own, or comes from another place."""
    flags: dict[str, Any] = {"mirror": "file:mirror", "save_dir": "run"}
    Mirror("file:mirror").write_owner("theirs")
    if known == "id":
        Path("run").mkdir()
        write_state(Path("run"), MirrorState(id="mine"))
    else:
        write_checkpoint(Path("run" if known == "checkpoints" else "there"), 2)
    config = resolve(flags | ({"resume": "there"} if known == "place" else {}), [], None)
    assert restore.restore_from_mirror(config, attempt=0, begun=[]) == ("", []), "it has none yet"
    Mirror("file:mirror").upload_checkpoint(write_checkpoint(Path("theirs"), 3), lambda: None)
    with pytest.raises(RequestError, match="holds the checkpoints of another run than run"):
        restore.restore_from_mirror(config, attempt=0, begun=[])


def test_the_user_is_told_that_a_mirror_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    monkeypatch.setattr(restore, "_SLOW", 0.1)
    monkeypatch.setattr(Mirror, "list_steps", lambda _: wait_until(lambda: bool(notes), "the note") or [])
    config = resolve({"mirror": "file:mirror", "save_dir": "run"}, [], None)
    assert restore.restore_from_mirror(config, attempt=0, begun=[], note=notes.append) == ("", [])
    assert notes == ["--mirror file:mirror: no answer for 0.1 s; still waiting"]


class CutFile(FileIO):
    """A file in the mirror whose connection breaks while a checkpoint is copied; run.json can still be read."""

    def read(self, size: int | None = -1) -> bytes:
        if Path(str(self.name)).name == OWNER:
            return super().read(size) or b""
        raise ConnectionError("the network is gone")


def refuse(*_: object) -> None:
    raise OSError("the disk is full")


def test_a_launcher_refuses_before_it_chooses_a_folder() -> None:
    write_checkpoint(Path("mirror"), 3)
    changes = {"mirror": "file:mirror", "resume": "never", "multi_gpu": "ddp", "nproc_per_node": 2}
    with pytest.raises(RequestError, match="already holds a run"):
        train(resolve(changes, [], None))
    assert [path.name for path in Path().iterdir()] == ["mirror"]


def test_a_dry_run_takes_nothing_from_a_mirror() -> None:
    write_checkpoint(Path("mirror"), 3)
    assert run_training(1, **RUN, dry_run=True).error == ""
    assert not Path("run").exists()


@pytest.mark.slow  # the process gives up after a minute without a server
def test_a_folder_that_has_the_newest_checkpoint_goes_on_without_its_server() -> None:
    assert run_training(1, **RUN | {"epochs": 1}).error == ""
    gone = run_training(1, **RUN | {"mirror": "s3://bucket/run"}, environ={"AWS_ENDPOINT_URL": "http://127.0.0.1:9"})
    assert gone.error == ""
    assert gone.summary["steps"] == 12
