"""Links and FIFOs in place of the files of a run or of a mirror on disk: none is followed or waited for."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from multigpu_cli.checkpoint.manifest import BEST, MANIFEST
from multigpu_cli.config.regular_files import NotRegularFile
from multigpu_cli.errors import RequestError, TrainingError
from multigpu_cli.mirror.follower import read_state
from multigpu_cli.mirror.part import MirrorProcess, mirror_run
from multigpu_cli.mirror.remote import FINAL_FILES, OWNER, SMALL_FILES, DamagedMirror, Mirror
from tests.config.test_regular_files import within_seconds
from tests.mirror.test_mirror_process import end, follower
from tests.support.mirrors import write_checkpoint

STEP = "checkpoints/step_00000003"

Plant = Callable[[Path], None]


@pytest.fixture(params=["link", "fifo"])
def plant(request: pytest.FixtureRequest, tmp_path: Path) -> Plant:
    """Put a link to a secret, or a FIFO, in the place of a file."""
    secret = tmp_path / "secret"
    secret.write_text('{"id": "a secret"}')

    def replace(path: Path) -> None:
        path.unlink(missing_ok=True)
        os.mkfifo(path) if request.param == "fifo" else path.symlink_to(secret)

    return replace


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with one checkpoint and every other file that is mirrored."""
    write_checkpoint(tmp_path / "run", 3)
    for name in (*SMALL_FILES, *FINAL_FILES):
        (tmp_path / "run" / name).write_text("{}")
    return tmp_path / "run"


@pytest.fixture
def mirror(run: Path) -> Path:
    """A complete mirror of the run."""
    assert follower(run).follow(end())
    return run.parent / "mirror"


@pytest.mark.parametrize("name", [*SMALL_FILES, *FINAL_FILES])
def test_follower_sends_no_link_or_fifo(name: str, plant: Plant, run: Path) -> None:
    plant(run / name)
    with within_seconds(20):
        assert not follower(run).follow(end()), "the mirror is complete"
    assert str(run / name) in read_state(run).error
    assert not (run.parent / "mirror" / name).exists()


@pytest.mark.parametrize("name", ["state.pt", BEST, MANIFEST])
def test_upload_refuses_a_link_or_fifo_of_a_checkpoint(name: str, plant: Plant, run: Path) -> None:
    plant(run / STEP / name)
    with within_seconds(20), pytest.raises(NotRegularFile, match=name):
        Mirror(f"file:{run.parent}/mirror").upload_checkpoint(run / STEP, lambda: None)
    assert not (run.parent / "mirror").exists()


@pytest.mark.parametrize("name", ["journal.jsonl", "best.pt", f"{STEP}/state.pt", f"{STEP}/{MANIFEST}"])
def test_download_refuses_a_link_or_fifo(name: str, plant: Plant, mirror: Path, tmp_path: Path) -> None:
    plant(mirror / name)
    with within_seconds(20), pytest.raises(DamagedMirror, match=Path(name).name):
        Mirror(f"file:{mirror}").download_checkpoint(3, tmp_path / "restored")
    assert not (tmp_path / "restored" / STEP).exists()
    assert not (tmp_path / "restored" / name).exists()


def test_owner_is_not_read_from_a_link_or_fifo(plant: Plant, mirror: Path) -> None:
    plant(mirror / OWNER)
    with within_seconds(20), pytest.raises(DamagedMirror, match=OWNER):
        Mirror(f"file:{mirror}").read_owner()


def test_upload_replaces_links_and_fifos_of_the_mirror(plant: Plant, run: Path, mirror: Path) -> None:
    names = (*SMALL_FILES, *FINAL_FILES, f"{STEP}/state.pt", f"{STEP}/{MANIFEST}")
    for name in names:
        plant(mirror / name)
    remote = Mirror(f"file:{mirror}")
    with within_seconds(20):
        remote.upload_checkpoint(run / STEP, lambda: None)
        for file in (*SMALL_FILES, *FINAL_FILES):
            remote.upload_file(run / file, lambda: None)
    assert [name for name in names if (mirror / name).is_symlink()] == []
    assert [name for name in names if (mirror / name).read_bytes() != (run / name).read_bytes()] == []
    assert (run.parent / "secret").read_text() == '{"id": "a secret"}'


@pytest.mark.parametrize("content", ["[" * 90_000, "[1]", '{"step": "x"}'])
def test_manifest_of_a_stranger_is_damage(content: str, mirror: Path) -> None:
    (mirror / STEP / MANIFEST).write_text(content)
    with pytest.raises(DamagedMirror, match=r"manifest\.json can't be read"):
        Mirror(f"file:{mirror}").read_manifest(3)


def test_mirror_command_names_a_lock_that_is_a_fifo(run: Path) -> None:
    os.mkfifo(run / ".mirror.lock")
    with within_seconds(20), pytest.raises(RequestError, match=r"\.mirror\.lock"):
        mirror_run(str(run), f"file:{run.parent}/mirror")


def test_mirror_command_names_a_summary_that_is_a_fifo(run: Path) -> None:
    (run / "summary.json").unlink()
    os.mkfifo(run / "summary.json")
    with within_seconds(20), pytest.raises(TrainingError, match=r"summary\.json"):
        mirror_run(str(run), f"file:{run.parent}/mirror")


def test_run_names_a_mirror_log_that_is_a_fifo(run: Path) -> None:
    (run / "logs").mkdir()
    os.mkfifo(run / "logs/mirror.log")
    with within_seconds(20), pytest.raises(TrainingError, match=r"mirror\.log"):
        MirrorProcess(run, f"file:{run.parent}/mirror", 3)
