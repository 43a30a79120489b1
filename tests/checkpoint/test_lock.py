import errno
import fcntl
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from multigpu_cli.checkpoint import files
from multigpu_cli.checkpoint.files import (
    check_owner,
    check_unlocked,
    fail_on_write_error,
    is_locked,
    lock_folder,
    read_owner,
    wait_until_unlocked,
)
from multigpu_cli.config.regular_files import UnsafeFolder
from multigpu_cli.errors import RequestError, TrainingError
from tests.support.fork import exit_code


def another_process(work: Callable[[], object]) -> bool:
    """Whether it succeeds in a process of its own."""
    return exit_code(work) == 0


def take(folder: Path) -> None:
    with lock_folder(folder):
        pass


def test_one_process_owns_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "run"
    assert not is_locked(folder)
    check_unlocked(folder)
    with lock_folder(folder):
        assert folder.is_dir()
        assert is_locked(folder)
        assert not another_process(lambda: take(folder))
        for ask in (take, check_unlocked):
            with pytest.raises(RequestError, match=r"another run is using .*run"):
                ask(folder)
        assert is_locked(folder), "asking does not break the lock"
        assert not (folder / ".lock").stat().st_mode & 0o111
    assert not is_locked(folder)
    assert another_process(lambda: take(folder))


def test_a_killed_owner_leaves_no_lock(tmp_path: Path) -> None:
    def killed() -> None:
        with lock_folder(tmp_path):
            os.kill(os.getpid(), 9)

    assert exit_code(killed) == -9
    assert not is_locked(tmp_path)
    take(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP])
def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    take(tmp_path)

    def refuse(file: Any, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    for ask in (take, is_locked):
        with pytest.raises(RequestError) as refused:
            ask(tmp_path)
        assert f"{tmp_path}: the file system does not support the lock of a run ({os.strerror(number)})" in str(
            refused.value
        )
        assert "another --save-dir" in str(refused.value)


def test_who_asks_is_not_taken_for_an_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All nodes ask at the same moment of a start, and `status` at any."""
    take(tmp_path)
    real = fcntl.flock

    def slow(file: Any, how: int) -> None:
        real(file, how)
        time.sleep(0.05)

    monkeypatch.setattr(fcntl, "flock", slow)
    with ThreadPoolExecutor(2) as nodes:
        assert not any(nodes.map(is_locked, [tmp_path] * 4))
        asking = nodes.submit(is_locked, tmp_path)
        time.sleep(0.01)
        take(tmp_path)
        assert not asking.result()


def test_an_owner_that_ends_is_waited_for(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as other:
        with lock_folder(tmp_path):
            assert not wait_until_unlocked(tmp_path, patience=0)
            waiting = other.submit(wait_until_unlocked, tmp_path, patience=60)
            time.sleep(0.1)
            assert not waiting.done()
        assert waiting.result()


def test_a_folder_that_cannot_be_made_is_a_wrong_request(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match=r"--save-dir .*file/run"), lock_folder(tmp_path / "file" / "run"):
        pass


def test_a_disk_that_is_full_only_once_its_data_is_flushed_ends_the_run_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(RequestError, match=r"Disk quota exceeded\n  try: free some space, or use another --save-dir"):
        take(tmp_path)


def test_the_lock_names_its_owner_so_that_a_folder_in_its_place_is_told_apart(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert read_owner(run) == ""
    take(run)
    with lock_folder(run):
        check_owner(run)
        assert read_owner(run) == f"{os.uname().nodename} {os.getpid()}"
        (run / ".lock").unlink()
        run.rmdir()
        with pytest.raises(FileNotFoundError, match="the run folder was removed"):
            check_owner(run)
        run.mkdir()
        check_owner(run)
        (run / ".lock").write_text("1")
        with pytest.raises(OSError, match="run now belongs to another run"):
            check_owner(run)


def test_a_lock_that_becomes_a_link_after_the_look_at_it_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / ".lock").symlink_to("theirs")
    with pytest.raises(UnsafeFolder):
        take(tmp_path)
    monkeypatch.setattr(files, "refuse_links", lambda folder: None)
    with pytest.raises(RequestError, match="--save-dir"):
        take(tmp_path)
    assert (tmp_path / "theirs").read_text() == "theirs"


def test_what_must_be_written_and_cannot_is_a_failure_with_a_name(tmp_path: Path) -> None:
    with (
        pytest.raises(TrainingError, match=r"run can't be written to: \[Errno 28\] full\n  try: free some space"),
        fail_on_write_error(Path("run")),
    ):
        raise OSError(28, "full")
