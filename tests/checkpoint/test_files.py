import errno
import os
import signal
from pathlib import Path

import pytest

from multigpu_cli.checkpoint import files
from multigpu_cli.checkpoint.files import publish
from tests.forked import exit_code


def test_a_file_gets_its_content(tmp_path: Path) -> None:
    publish(tmp_path / "a.txt", b"first")
    publish(tmp_path / "a.txt", b"second")
    publish(tmp_path / "empty", b"")
    assert (tmp_path / "a.txt").read_bytes() == b"second"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "empty"]


@pytest.mark.parametrize("failing", ["posix_fallocate", "fsync"])
def test_a_full_disk_leaves_the_old_file_and_no_draft(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path / "a.txt", b"old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, failing, full)
    with pytest.raises(OSError, match="No space left"):
        publish(tmp_path / "a.txt", b"new")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_the_name_appears_only_after_the_bytes_are_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    for owner, name in ((os, "fsync"), (Path, "replace"), (files, "flush_folder")):
        original = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *given, original=original, name=name: (order.append(name), original(*given))[1]
        )
    publish(tmp_path / "a.txt", b"bytes")
    assert order == ["fsync", "replace", "flush_folder", "fsync"]


@pytest.mark.parametrize(("owner", "name"), [(os, "fsync"), (Path, "replace")])
def test_a_kill_leaves_the_old_file(owner: object, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path / "a.txt", b"old")
    with monkeypatch.context() as deadly:
        deadly.setattr(owner, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        assert exit_code(lambda: publish(tmp_path / "a.txt", b"new" * 1000)) == -signal.SIGKILL
    assert (tmp_path / "a.txt").read_bytes() == b"old"
    publish(tmp_path / "a.txt", b"next")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"], "the draft of the killed one is used again"
