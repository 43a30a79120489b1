import json
from dataclasses import replace
from pathlib import Path

import pytest

from multigpu_cli.config.paths import explain_dataset, find_data_errors, find_datasets, is_path
from multigpu_cli.config.schema import Config
from multigpu_cli.config.sources import explicit_dump, resolve
from multigpu_cli.config.yaml_text import dump_config
from multigpu_cli.errors import RequestError


def touch_files(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("names", "kinds"),
    [
        (["t.csv"], ["csv"]),
        (["t.CSV.gz"], ["csv"]),
        (["t.tsv", "README.txt", "LICENSE"], ["csv"]),
        (["train.csv", "test.csv"], ["csv"]),
        (["t.npz", "notes.txt"], ["npz"]),
        (["input.txt"], ["text"]),
        (["train.bin", "val.bin"], ["text"]),
        (["one.txt", "two.txt"], []),
        (["train-0.parquet", "dataset_infos.json"], ["chat"]),
        (["train.json", "test.json"], ["chat"]),
        (["state.json", "t.arrow"], ["arrow"]),
        (["cat/a.jpg", "dog/b.PNG"], ["image-folder"]),
        (["train/cat/a.jpg", "val/cat/b.jpg"], ["image-folder"]),
        (["labels.csv", "cat/a.jpg"], ["csv", "image-folder"]),
        (["a.jpg", ".cache/x/y.jpg", "deep/er/a.jpg"], []),
        (["images/train/a.jpg", "masks/train/a.png"], ["image-folder"]),
        (["__MACOSX/._a.jpg", "cat/._a.jpg"], []),
        (["._t.csv", ".hidden.npz", "input.txt"], ["text"]),
        ([], []),
    ],
)
def test_a_folder_is_recognized_by_its_files(tmp_path: Path, names: list[str], kinds: list[str]) -> None:
    assert list(find_datasets(touch_files(tmp_path, *names))) == kinds


@pytest.mark.parametrize(
    ("word", "holds"),
    [("t.csv", True), ("./photos", True), ("photos/", True), ("digits", False), ("mine.data:load", False)],
)
def test_a_name_has_neither_dot_nor_slash(word: str, holds: bool) -> None:
    assert is_path(word) == holds


def test_the_files_choose_the_dataset_and_the_plan_says_why(tmp_path: Path) -> None:
    file = str(touch_files(tmp_path, "t.csv") / "t.csv")
    for flags in ({"data": file}, {"data_dir": file}):
        config = resolve(flags, [], None)
        assert (config.data.name, config.data.dir) == ("csv", file)
        assert explain_dataset(config) == "t.csv is a .csv file"
    assert resolve({"data_dir": str(tmp_path)}, [], None).data.name == "csv"
    assert explain_dataset(resolve({"data": "digits", "data_dir": str(tmp_path)}, [], None)) == ""
    assert explain_dataset(Config()) == ""


def test_an_explicit_name_wins(tmp_path: Path) -> None:
    file = str(touch_files(tmp_path, "t.csv") / "t.csv")
    (tmp_path / "recipe.yaml").write_text("data: har\ndata.args.val_subjects: 2\n")
    recipe = str(tmp_path / "recipe.yaml")
    assert resolve({"data": "text", "data_dir": file}, [], None).data.name == "text"
    assert resolve({"data_dir": file}, [], recipe).data.name == "har"
    config = resolve({"data": file}, [], recipe)
    assert (config.data.name, config.data.args) == ("csv", {}), "the arguments were another dataset's"


def test_config_yaml_has_the_recognized_dataset(tmp_path: Path) -> None:
    file = str(touch_files(tmp_path, "t.csv") / "t.csv")
    config = resolve({"data_dir": file}, [], None)
    assert "data" not in config.explicit, "a checkpoint's dataset is kept"
    (tmp_path / "config.yaml").write_text(dump_config(config))
    (tmp_path / "t.csv").rename(tmp_path / "moved")
    again = resolve({"data_dir": str(tmp_path / "moved")}, [], str(tmp_path / "config.yaml"))
    assert again.data.name == "csv"


def test_a_worker_recognizes_the_same(tmp_path: Path) -> None:
    file = str(touch_files(tmp_path, "t.npz") / "t.npz")
    for flags in ({"data": file}, {"data_dir": file}):
        config = resolve(flags, [], None)
        (tmp_path / "worker.json").write_text(json.dumps(explicit_dump(config)))
        assert replace(resolve({}, [], str(tmp_path / "worker.json")), recipe=None) == config


def test_a_path_given_twice_is_refused(tmp_path: Path) -> None:
    file = str(touch_files(tmp_path, "t.csv") / "t.csv")
    with pytest.raises(RequestError, match="can't be used with --data-dir"):
        resolve({"data": file, "data_dir": file}, [], None)


def test_a_folder_that_is_not_recognized_needs_a_name_or_a_checkpoint(tmp_path: Path) -> None:
    data, run = touch_files(tmp_path / "data", "notes.md"), touch_files(tmp_path / "run", "config.yaml")
    (tmp_path / "har.yaml").write_text("data: har\n")
    flags = {"data_dir": str(data), "save_dir": str(run)}
    [error] = find_data_errors(resolve(flags, [], None))
    assert "no dataset is recognized in this folder" in str(error), "a run without a checkpoint would begin on digits"
    assert not list(find_data_errors(resolve(flags, [], str(tmp_path / "har.yaml"))))
    touch_files(run, "checkpoints/step_4/manifest.json")
    assert not list(find_data_errors(resolve(flags, [], None)))
    assert not list(find_data_errors(resolve({"data_dir": str(data), "resume": str(run)}, [], None)))
