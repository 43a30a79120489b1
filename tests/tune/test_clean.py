"""`tune clean`: checkpoints of trials that lost go, and the study stays as it was."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import main_multi_gpu
from multigpu_cli.checkpoint.files import lock_folder
from multigpu_cli.tune import driver
from multigpu_cli.tune.study import clean_study, summarize
from multigpu_cli.tune.trials import Trial, continue_study, read_study
from tests.tune.studies import FAKE, PARAMS, make_driver, make_study, make_trials, read_trials

SMALL: dict[str, Any] = {"trials": 6, "generation": 3, "rungs": [1, 3, 9], "sampler": "random"}


def plant(folder: Path) -> None:
    """A checkpoint of 100 bytes, and a journal where there is none."""
    checkpoint = folder / "checkpoints" / "step_00000010"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text(" " * 100)
    (folder / "journal.jsonl").touch()


def list_planted(path: Path) -> list[int]:
    return sorted(int(file.parents[2].name) for file in path.glob("trials/*/checkpoints/*/manifest.json"))


def test_tune_clean_frees_all_but_the_winner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(driver, "FRONT_DOOR", FAKE)
    monkeypatch.setattr(sys, "executable", sys._base_executable)  # type: ignore[attr-defined]
    own = make_driver(tmp_path, make_study(**SMALL))
    best = summarize(own, own.run())["best"]["number"]
    for number in range(6):
        plant(tmp_path / "trials" / f"{number:04d}")
    before = read_trials(tmp_path)
    with lock_folder(tmp_path):
        assert main_multi_gpu.run(["tune", "clean", str(tmp_path)]) == 0
        assert main_multi_gpu.run(["tune", "clean", str(tmp_path), "--yes"]) == 2
    assert list_planted(tmp_path) == list(range(6))
    assert "--yes removes 5 checkpoints, 0.49 KiB of 5 runs" in capsys.readouterr().out
    assert main_multi_gpu.run(["tune", "clean", str(tmp_path), "--yes", "--json"]) == 0
    assert sum(each["bytes"] for each in json.loads(capsys.readouterr().out) if each["removed"]) == 500
    assert list_planted(tmp_path) == [best]
    grown = continue_study(tmp_path, *read_study(tmp_path), make_study(**SMALL | {"trials": 9}))
    own = make_driver(tmp_path, grown)
    assert summarize(own, own.run())["status"] == "completed"
    assert read_trials(tmp_path)[:6] == before


PAUSED = [(0, "paused", 0.1), (1, "completed", 0.4), (0, "failed", None)]


@pytest.mark.parametrize(
    ("given", "stands", "kept"),
    [
        ({}, [*PAUSED, (0, "paused", 0.5), (0, "waiting", None)], [1, 3, 4]),
        ({}, [*PAUSED, (0, "paused", 0.5), (1, "paused", 0.2), (0, "diverged", None)], [1, 3, 4]),
        ({"order": "async"}, PAUSED, [0, 1]),
        ({"objectives": ["val_a:max"], "rungs": [9]}, [(0, "completed", 0.3), (0, "completed", 0.2)], [0]),
    ],
)
def test_tune_clean_keeps_what_an_unfinished_study_may_use(
    given: dict[str, Any], stands: list[tuple[int, str, float | None]], kept: list[int], tmp_path: Path
) -> None:
    make_study(**SMALL | given).write(tmp_path)
    for trial in make_trials(*stands):
        trial.write(tmp_path)
        plant(tmp_path / "trials" / f"{trial.number:04d}")
    clean_study(tmp_path, remove=True)
    assert list_planted(tmp_path) == kept


def test_tune_clean_keeps_the_front_and_frees_each_seed(tmp_path: Path) -> None:
    study = make_study(**SMALL | {"objectives": ["val_a:max", "val_b:min"], "rungs": [9], "trials": 3, "seeds": 2})
    study.write(tmp_path)
    for number, values in enumerate([[0.9, 0.9], [0.1, 0.1], [0.1, 0.5]]):
        Trial(number, dict(PARAMS), 0, "completed", {9: values}).write(tmp_path)
        for run in range(2):
            plant(study.run_folder(tmp_path, number, run))
    clean_study(tmp_path, remove=True)
    assert [len(list(tmp_path.glob(f"trials/000{number}/*/checkpoints/*"))) for number in range(3)] == [2, 2, 0]
