import os
from pathlib import Path

import pytest

from multigpu_cli.data import files as open_files
from multigpu_cli.data.files import OpenFiles


def count_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_only_some_files_are_open_and_none_has_a_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "_MOST", 2)
    paths = [tmp_path / str(number) for number in range(4)]
    for number, path in enumerate(paths):
        path.write_text(f"file {number}")
    before = count_open()
    files = OpenFiles(paths)
    for number in (0, 1, 2, 3, 0):
        assert files.read(number, 5, 1) == str(number).encode()
        assert count_open() <= before + 2
    assert [os.lseek(number, 0, os.SEEK_CUR) for number in files._open.values()] == [0, 0], "forked readers share it"
