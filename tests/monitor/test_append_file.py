import os
import resource
import threading
from pathlib import Path

import pytest

from multigpu_cli.monitor import journal
from multigpu_cli.monitor.journal import AppendFile
from tests.support.fork import exit_code


class Disk:
    """Stands for os.write: takes so many bytes and is full then."""

    def __init__(self, room: int) -> None:
        self.room, self._write = room, os.write

    def __call__(self, file: int, data: bytes) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        written = self._write(file, bytes(data[: self.room]))
        self.room -= written
        return written


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    found = Disk(10)
    monkeypatch.setattr(os, "write", found)
    return found


def test_lines_wait_for_room_and_lose_nothing(tmp_path: Path, disk: Disk) -> None:
    """The disk fills up in the middle of the second line."""
    said: list[str] = []
    file = AppendFile(tmp_path / "a", said.append)
    for line in ("first", "second", "third"):
        file.add(line)
    assert (tmp_path / "a").read_text() == "first\n", "no reader meets half a line"
    assert said == [f"{tmp_path / 'a'} can't be written ([Errno 28] No space left on device); its lines wait in memory"]
    disk.room = 1000
    file.add("fourth")
    assert (tmp_path / "a").read_text() == "first\nsecond\nthird\nfourth\n"
    disk.room = 0
    file.add("fifth")
    assert len(said) == 2, "said once each time it happens"


def test_what_never_found_room_is_counted_in_the_end(tmp_path: Path, disk: Disk) -> None:
    said: list[str] = []
    file = AppendFile(tmp_path / "a", said.append)
    for line in ("first", "second", "third"):
        file.add(line)
    file.close()
    assert said[1] == f"{tmp_path / 'a'}: 2 lines are lost ([Errno 28] No space left on device)"
    file.add("after the end")
    disk.room = 1000
    AppendFile(tmp_path / "a", said.append).add("the next attempt")
    assert (tmp_path / "a").read_text() == "first\nthe next attempt\n"


def test_a_full_disk_and_a_kill_leave_whole_lines_only(tmp_path: Path) -> None:
    """The kernel writes a part of a line before it says that a file may grow no more."""
    file, length = tmp_path / "a", 70_000

    def full() -> None:
        lines_of = AppendFile(file, lambda _: None)
        lines_of.add("1" * length)
        resource.setrlimit(resource.RLIMIT_FSIZE, (length + 100, resource.RLIM_INFINITY))
        lines_of.add("2" * length)
        assert file.read_text() == "1" * length + "\n"
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * length + 100, resource.RLIM_INFINITY))
        lines_of.add("3" * length)
        assert file.read_text() == "1" * length + "\n" + "2" * length + "\n"

    assert exit_code(full) == 0
    with open(file, "a") as torn:
        torn.write("4" * length)
    AppendFile(file).add("5")
    assert file.read_text().splitlines() == ["1" * length, "2" * length, "5"]


def test_memory_is_not_filled_instead(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_MOST", 20)
    said: list[str] = []
    file = AppendFile(tmp_path / "a", said.append)
    for number in range(100):
        file.add(f"line {number}")
    disk.room = 1000
    file.close()
    assert (tmp_path / "a").read_text() == "line 0\nline 1\nline 2\nline 3\n"
    assert "a: 96 lines are lost (" in said[-1]


def test_a_file_that_is_removed_is_made_again_whole(tmp_path: Path) -> None:
    said: list[str] = []
    folder = tmp_path / "run"
    folder.mkdir()
    file = AppendFile(folder / "a", said.append)
    file.add("first")
    (folder / "a").unlink()
    folder.rmdir()
    file.add("second")
    assert "No such file or directory" in said[0]
    folder.mkdir()
    file.add("third")
    assert (folder / "a").read_text() == "first\nsecond\nthird\n"


def test_a_file_of_somebody_else_in_its_place_is_left_alone(tmp_path: Path) -> None:
    said: list[str] = []
    file = AppendFile(tmp_path / "a", said.append)
    file.add("first")
    (tmp_path / "a").unlink()
    (tmp_path / "a").write_text("another's\n")
    file.add("second")
    file.close()
    assert (tmp_path / "a").read_text() == "another's\n"
    assert len(said) == 2


def test_complaints_may_come_from_any_thread(tmp_path: Path, disk: Disk) -> None:
    """A checkpoint is journalled by the thread that wrote it."""
    said: list[str] = []
    file = AppendFile(tmp_path / "a", said.append)

    def write() -> None:
        for _ in range(50):
            file.add("x" * 20)

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    disk.room = 10**6
    file.close()
    assert (tmp_path / "a").read_text() == ("x" * 20 + "\n") * 150
    assert len(said) == 1
