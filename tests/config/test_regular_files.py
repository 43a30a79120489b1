"""Files in folders that others can write into: links, FIFOs and devices are neither followed nor waited for."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import main_multi_gpu
from multigpu_cli.checkpoint.files import is_locked, lock_folder, publish, read_owner
from multigpu_cli.config.regular_files import NotRegularFile, open_new, open_regular, read_small, without_links
from multigpu_cli.monitor.journal import AppendFile, read_events, read_json
from multigpu_cli.watch.runs import WatchedRuns
from multigpu_cli.watch.view import list_runs
from tests.commands.runs import interrupted_run


@contextmanager
def within_seconds(seconds: int) -> Iterator[None]:
    """Fail a test that waits for a FIFO, which would otherwise hang."""

    def fail(*_: object) -> None:
        raise TimeoutError("the reader waits for a writer of the FIFO")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(params=["fifo", "link", "folder", "device"])
def trap(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Something that is no regular file, in the place of one."""
    path, secret = tmp_path / "trap", tmp_path / "secret"
    secret.write_text('{"event": "start", "time": 1}')
    match request.param:
        case "fifo":
            os.mkfifo(path)
        case "link":
            path.symlink_to(secret)
        case "folder":
            path.mkdir()
        case "device":
            path.symlink_to("/dev/zero")
    return path


def test_reader_refuses_what_is_no_regular_file(trap: Path) -> None:
    with within_seconds(20):
        for read in (open_regular, read_small, lambda path: list(read_events(path))):
            with pytest.raises(OSError, match=r"trap"):
                read(trap)
        with pytest.warns(UserWarning, match="trap is damaged, and not used"):
            assert read_json(trap, "summary.json") == {}


def test_writer_never_follows_a_link(tmp_path: Path) -> None:
    victim, link, absent = tmp_path / "victim", tmp_path / "link", tmp_path / "absent"
    victim.write_text("untouched")
    link.symlink_to(victim)
    with pytest.raises(FileExistsError):
        open_new(link)
    dangling = tmp_path / "dangling"
    dangling.symlink_to(absent)
    with pytest.raises(FileExistsError):
        open_new(dangling)
    assert victim.read_text() == "untouched"
    assert not absent.exists()


def test_log_is_appended_to_regular_files_only(trap: Path, tmp_path: Path) -> None:
    """Not to a FIFO either which somebody reads, so that opening it would succeed."""
    with within_seconds(20), ExitStack() as stack:
        if trap.is_fifo():
            stack.callback(os.close, os.open(trap, os.O_RDONLY | os.O_NONBLOCK))
        for append in (lambda path: open(path, "ab", opener=without_links).close(), AppendFile):
            with pytest.raises(NotRegularFile, match="trap"):
                append(trap)
    for _ in range(2):
        with open(tmp_path / "log", "ab", opener=without_links) as log:
            log.write(b"a")
    assert (tmp_path / "log").read_bytes() == b"aa"


def test_publish_replaces_a_link_and_leaves_its_target(tmp_path: Path) -> None:
    """The draft has a name that nobody can plant a link under beforehand."""
    victim, path = tmp_path / "victim", tmp_path / "summary.json"
    victim.write_text("untouched")
    path.symlink_to(victim)
    (tmp_path / f".summary.json.{os.getpid()}.draft").symlink_to(victim)
    publish(path, b"new")
    assert victim.read_text() == "untouched"
    assert not path.is_symlink()
    assert path.read_text() == "new"


def test_read_small_refuses_more_than_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_bytes(b"x" * 9)
    assert read_small(file, 9) == b"x" * 9
    with pytest.raises(OSError, match="larger than 8 bytes"):
        read_small(file, 8)


def test_lock_that_is_a_fifo_is_an_error_and_no_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".lock")
    with within_seconds(20):
        assert read_owner(tmp_path) == ""
        with pytest.raises(main_multi_gpu.RequestError):
            is_locked(tmp_path)
        with pytest.raises(main_multi_gpu.RequestError, match="not a regular file"), lock_folder(tmp_path):
            pass


@pytest.mark.filterwarnings("ignore:.* is damaged, and not used")
@pytest.mark.parametrize("name", ["summary.json", "plan.json", "logs/state.json", "journal.jsonl"])
def test_fifo_in_one_run_hides_no_other_run(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    interrupted_run(tmp_path / "sound")
    interrupted_run(tmp_path / "odd")
    fifo = tmp_path / "odd" / name
    fifo.parent.mkdir(exist_ok=True)
    fifo.unlink(missing_ok=True)
    os.mkfifo(fifo)
    with within_seconds(60):
        assert main_multi_gpu.run(["status", str(tmp_path)]) == 0
        assert str(tmp_path / "sound") in capsys.readouterr().out
        assert "sound" in str(list_runs(WatchedRuns([str(tmp_path)]), 1.0))


def test_checkpoints_names_weights_that_are_a_fifo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(interrupted_run(tmp_path / "run") / "best.pt")
    with within_seconds(60):
        assert main_multi_gpu.run(["checkpoints", str(tmp_path / "run")]) == 1
        assert "best.pt is not a torch.save file (NotRegularFile)" in capsys.readouterr().out
