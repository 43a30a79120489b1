import errno
import os
import signal
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from multigpu_cli.checkpoint import files
from multigpu_cli.checkpoint.files import compute_sha256, publish, remove_drafts
from tests.support.fork import exit_code
from tests.test_house_rules import ROOT


def test_a_file_gets_its_content(tmp_path: Path) -> None:
    publish(tmp_path / "a.txt", b"first")
    publish(tmp_path / "a.txt", b"second")
    publish(tmp_path / "empty", b"")
    assert (tmp_path / "a.txt").read_bytes() == b"second"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "empty"]


def test_each_piece_that_has_reached_the_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIECE", 4)
    told, flush = list[object](), os.fsync

    def note_content(*before: str) -> None:
        content = next(tmp_path.glob(".a.*.draft"), tmp_path / "a").read_bytes()
        told.append((*before, len(content), content.rstrip(b"\0")))

    monkeypatch.setattr(os, "fsync", lambda file: (note_content("fsync"), flush(file))[1])
    parts, whole = (b"012", b"3", b"45678", b"9a"), b"0123456789a"
    files.publish_stream(tmp_path / "a", lambda file: [file.write(part) for part in parts], 11, note_content)
    assert told == [
        *(("fsync", 11, whole[:4]), (11, whole[:4]), ("fsync", 11, whole[:8]), (11, whole[:8])),
        *(("fsync", 11, whole), ("fsync", 11, whole), (11, whole)),
    ], "two pieces, the end and the folder; room for all of it was taken first"
    moves = list[int]()
    assert compute_sha256(tmp_path / "a", lambda: moves.append(0)) == sha256(whole).hexdigest()
    assert len(moves) == 3


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


def test_content_that_breaks_off_leaves_no_draft(tmp_path: Path) -> None:
    def break_off(file: files.DraftFile) -> None:
        file.write(b"half")
        raise KeyError("the source is gone")

    with pytest.raises(KeyError):
        files.publish_stream(tmp_path / "a.txt", break_off, 8)
    assert list(tmp_path.iterdir()) == []


def test_the_name_appears_only_after_the_bytes_are_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    for owner, name in ((os, "fsync"), (Path, "replace"), (files, "flush_folder"), (os, "close")):
        original = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *given, original=original, name=name: (order.append(name), original(*given))[1]
        )
    publish(tmp_path / "a.txt", b"bytes")
    assert order == ["fsync", "replace", "flush_folder", "fsync", "close"]


@pytest.mark.parametrize(("owner", "name"), [(os, "fsync"), (Path, "replace")])
def test_a_kill_leaves_the_old_file(owner: object, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path / "a.txt", b"old")
    with monkeypatch.context() as deadly:
        deadly.setattr(owner, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        assert exit_code(lambda: publish(tmp_path / "a.txt", b"new" * 1000)) == -signal.SIGKILL
    assert (tmp_path / "a.txt").read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 2
    remove_drafts(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"], "the next start removes what it left"


def test_several_processes_may_publish_the_same_file_at_once(tmp_path: Path) -> None:
    """Ranks that run out of memory together leave the same note."""
    code = (
        "from pathlib import Path\nfrom multigpu_cli.checkpoint.files import publish\n"
        f"for _ in range(100): publish(Path({str(tmp_path / 'note')!r}), b'the same')"
    )
    ranks = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) for _ in range(3)]
    assert [rank.wait(60) for rank in ranks] == [0, 0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["note"]
