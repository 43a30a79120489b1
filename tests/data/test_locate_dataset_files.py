import os
from pathlib import Path

import numpy as np
import pytest

import main_multi_gpu
from multigpu_cli.data.files import DatasetFiles, find_part_files, locate_single_file
from multigpu_cli.data.rows.arrow import find_arrow_files
from multigpu_cli.errors import RequestError
from tests.config.test_regular_files import within_seconds

SHELLS = DatasetFiles(name="shells", address="https://sea.example", folders=(".", "inner"), layout="    shells.bin")


def test_the_first_folder_that_holds_a_landmark_is_taken(tmp_path):
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "shells.bin").touch()
    assert SHELLS.folder(str(tmp_path), ["shells.bin"]) == inner
    assert SHELLS.folder(str(inner), ["shells.bin"]) == inner
    (tmp_path / "shells.gz").touch()
    assert SHELLS.folder(str(tmp_path), ["shells.bin", "shells.gz"]) == tmp_path


def test_the_home_folder_may_be_written_as_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "shells.bin").touch()
    assert SHELLS.folder("~", ["shells.bin"]) == Path(tmp_path)


def test_what_is_missing_is_said_with_the_places_and_the_way_to_get_it(tmp_path):
    with pytest.raises(RequestError, match="--data shells needs --data-dir"):
        SHELLS.folder(None, ["shells.bin"])
    with pytest.raises(RequestError, match="is not a folder"):
        SHELLS.folder(str(tmp_path / "nowhere"), ["shells.bin"])
    with pytest.raises(RequestError, match="holds no shells") as refused:
        SHELLS.folder(str(tmp_path), ["shells.bin", "shells.gz"])
    assert f"looked for shells.bin or shells.gz in {tmp_path}, {tmp_path / 'inner'}" in refused.value.problem
    assert "https://sea.example" in refused.value.remedy
    assert refused.value.remedy.endswith("    shells.bin")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(RequestError, match=r"shells\.bin is missing"):
        SHELLS.content(tmp_path / "shells.bin")
    with pytest.raises(RequestError, match="can't be read") as refused:
        SHELLS.content(tmp_path)
    assert str(tmp_path) in refused.value.problem


def test_labels_are_counted_from_zero_and_the_wrong_one_is_named():
    assert SHELLS.check_labels(Path("y"), np.array([1, 3, 2]), 1, 3).tolist() == [0, 2, 1]
    with pytest.raises(RequestError, match="y: label 0 of sample 2 is not one of 1 … 3"):
        SHELLS.check_labels(Path("y"), np.array([1, 0]), 1, 3)


def test_hidden_files_are_none_of_a_dataset(tmp_path):
    for name in ("rows.csv", "._rows.csv", "train.arrow", "._val.arrow", ".ipynb_checkpoints"):
        (tmp_path / name).touch()
    assert locate_single_file("csv", str(tmp_path), None, "a table") == tmp_path / "rows.csv"
    parts = find_part_files("arrow", str(tmp_path), (".arrow",), "rows")
    assert parts == {"train": [tmp_path / "train.arrow"]}
    assert find_arrow_files(str(tmp_path)) == {"train": [tmp_path / "train.arrow"]}


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ("csv", "table.csv"),
        ("csv", "table.csv.gz"),
        ("jsonl", "rows.jsonl"),
        ("arrow", "data.arrow"),
        ("chat", "train.jsonl"),
        ("text", "text.txt"),
        ("npz", "data.npz"),
    ],
)
@pytest.mark.parametrize("by_folder", [True, False])
def test_fifo_in_place_of_data_is_refused(
    data: str, name: str, by_folder: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / name)
    place = tmp_path if by_folder else tmp_path / name
    arguments = ["--data", data, "--data-dir", str(place), "--save-dir", str(tmp_path / "run"), "--dry-run"]
    with within_seconds(60):
        assert main_multi_gpu.run(arguments) == 2
    said = capsys.readouterr().err
    assert str(tmp_path) in said
    assert "Traceback" not in said


def test_fifo_beside_the_data_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.csv").write_text("a,label\n" + "1,0\n2,1\n" * 40)
    os.mkfifo(tmp_path / "test.csv")
    data = ["--data", str(tmp_path / "train.csv"), "--set", "data.target=label", "--set", "data.test_file=test.csv"]
    with within_seconds(60):
        assert main_multi_gpu.run([*data, "--save-dir", str(tmp_path / "run"), "--dry-run"]) == 2
    assert "test.csv is a FIFO" in capsys.readouterr().err
