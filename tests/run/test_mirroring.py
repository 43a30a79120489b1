"""--mirror: a run whose folder is gone goes on from it, on another number of workers, with the same bits."""

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from multigpu_cli.checkpoint.mirror_process import lock_mirror
from multigpu_cli.checkpoint.mirror_state import read_state
from multigpu_cli.config.sources import resolve
from multigpu_cli.errors import RequestError
from multigpu_cli.monitor import journal
from tests.support.die_at_third_checkpoint import die_at_third_checkpoint
from tests.support.mirrors import read_mirrored_steps, s3_server, write_checkpoint
from tests.support.run_training import run_training
from train_multi_gpu import train

pytestmark = pytest.mark.usefixtures("in_tmp_path")
RUN: dict[str, Any] = {
    "epochs": 4, "batch_size": 4, "global_batch_size": 16, "log_interval": 1, "checkpoint_every": "2", "exact": True,
    "mirror": "file:mirror", "save_dir": "run",
}  # fmt: skip


def wait_for_mirror(run: str, seconds: float = 30) -> None:
    """Until the process of a killed run has sent what there was."""
    until = time.monotonic() + seconds
    while not read_state(Path(run)).complete:
        assert time.monotonic() < until, read_state(Path(run))
        time.sleep(0.05)
    with lock_mirror(Path(run)):
        return


def test_killed_on_two_workers_and_resumed_on_one_from_an_s3_server() -> None:
    whole = run_training(1, **RUN | {"mirror": None, "save_dir": "whole"})
    with s3_server() as bucket:
        flags = RUN | {"mirror": f"s3://{bucket}/run"}
        assert 0 in run_training(2, **flags, prepare=die_at_third_checkpoint).killed
        wait_for_mirror("run")
        shutil.rmtree("run")
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
        from multigpu_cli.checkpoint import mirror_process

        mirror_process.__name__ = "tests.support.no_such_module"

    ended = run_training(1, **RUN, prepare=break_mirror)
    assert ended.error == ""
    assert ended.summary["status"] == "completed"
    assert "mirror is not complete (see " in capfd.readouterr().out
    assert "no_such_module" in Path("run/logs/mirror.log").read_text()


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
    assert gone.summary["steps"] == 16
