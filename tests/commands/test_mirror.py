"""mirror RUN --to URL: what a run could not send is sent by hand."""

import os
from pathlib import Path

import pytest

from multigpu_cli.checkpoint.files import lock_folder
from multigpu_cli.errors import RequestError, TrainingError
from multigpu_cli.mirror import part as command
from multigpu_cli.mirror.follower import lock_mirror
from multigpu_cli.mirror.part import format_mirrored, mirror_run
from multigpu_cli.mirror.remote import Mirror, MirrorError
from tests.support.mirrors import read_mirrored_steps, write_checkpoint


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2):
        write_checkpoint(tmp_path / "run", step)
    (tmp_path / "run" / "config.yaml").write_text("{}")
    return tmp_path / "run"


def test_it_sends_the_newest_checkpoint_and_may_be_repeated(run: Path, tmp_path: Path) -> None:
    for _ in range(2):
        found = mirror_run(str(run), f"file:{tmp_path}/mirror")
        assert next(format_mirrored(found)).startswith(f"file:{tmp_path}/mirror holds the checkpoint of step 2 ")
    assert read_mirrored_steps(tmp_path / "mirror") == [2]
    assert (tmp_path / "mirror" / "config.yaml").exists()


def test_what_the_mirror_refuses_is_told(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def refuse(*_: object) -> None:
        tries.append(1)
        raise MirrorError("the bucket is gone")

    monkeypatch.setattr(command, "_PATIENCE", 0.05)
    monkeypatch.setattr(Mirror, "upload_checkpoint", refuse)
    with pytest.raises(
        TrainingError, match="the bucket is gone\n  try: repair what it names, and run the same command"
    ):
        mirror_run(str(run), f"file:{tmp_path}/mirror")
    assert 1 < len(tries) < 20  # 5 ms apart: that the checkpoint is read each time is no progress


def test_a_wrong_request_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="is not a run folder"):
        mirror_run(str(tmp_path), "file:mirror")
    with pytest.raises(RequestError, match="--to mirror: is not the URL of a folder"):
        mirror_run(str(run), "mirror")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.yaml").write_text("{}")
    with pytest.raises(RequestError, match="has no checkpoint to send"):
        mirror_run(str(tmp_path / "empty"), f"file:{tmp_path}/mirror")
    with lock_mirror(run), pytest.raises(RequestError, match=f"run: process {os.getpid()} on .* still sends this run"):
        mirror_run(str(run), f"file:{tmp_path}/mirror")
    with lock_folder(run), pytest.raises(RequestError, match="the run is active"):
        mirror_run(str(run), f"file:{tmp_path}/mirror")
    (run / "mirror.json").symlink_to(tmp_path / "theirs")
    with pytest.raises(RequestError, match=r"run/mirror\.json is a symbolic link"):
        mirror_run(str(run), f"file:{tmp_path}/mirror")
    assert not (tmp_path / "mirror").exists()
