"""The command around the driver, with the check of the space left out: begin, go on, refuse, forecast."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import main_multi_gpu
from multigpu_cli.checkpoint.files import lock_folder
from multigpu_cli.errors import RequestError
from multigpu_cli.tune import driver, study
from multigpu_cli.tune.report import report_study
from multigpu_cli.tune.space import find_place, parse_search
from multigpu_cli.tune.study import forecast
from multigpu_cli.tune.trials import Trial, continue_study, read_study
from tests.tune.studies import FAKE, make_study, make_trials

WORDS = [
    "tune",
    "--search",
    "lr=log(1e-4,1e-1)",
    "--objective",
    "val_accuracy:max",
    "--trials",
    "3",
    "--generation",
    "3",
]
ENDS = [{"epoch": 60, "bytes": 1e6}, {"epoch": 30, "bytes": 1e6}]
FOUND: dict[str, Any] = {"gpus": [], "cores": 2, "start": 3.0, "forecast": ENDS}


@pytest.fixture(autouse=True)
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "FRONT_DOOR", FAKE)
    monkeypatch.setattr(study, "check_space", lambda *_, **__: FOUND)


def run(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> tuple[int, str]:
    code = main_multi_gpu.run([*WORDS, "--rungs", "1", "--epochs", "3", "--save-dir", str(folder), *words])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_a_study_ends_and_the_same_command_finds_it_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = run(capsys, tmp_path / "a")
    assert code == 0
    assert "best: trial" in said
    assert "slots were idle for" in said
    code, again = run(capsys, tmp_path / "a", "--json", "--slots", "1")
    assert code == 0
    assert json.loads(again.splitlines()[0])["best"]["test"] == {"accuracy": 0.5}
    code, said = run(capsys, tmp_path / "a", "--seeds", "4")
    assert code == 2
    assert "seeds: 1; this command: 4" in said
    with lock_folder(tmp_path / "a"):
        code, said = run(capsys, tmp_path / "a")
    assert code == 2
    assert "another run is using" in said


def test_a_driver_that_can_write_no_more_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(driver, "export_journal", fill)
    code, said = run(capsys, tmp_path / "a")
    assert code == 1
    assert "a can't be written to: [Errno 28] No space left on device\n  try: free some space" in said


def test_a_winner_that_could_not_be_tested_is_tested_by_the_next_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "evaluate_trial", lambda *_: None)
    assert run(capsys, tmp_path)[0] == 0
    monkeypatch.undo()
    monkeypatch.setattr(driver, "FRONT_DOOR", FAKE)
    monkeypatch.setattr(study, "check_space", lambda *_, **__: FOUND)
    assert "test accuracy 0.5" in run(capsys, tmp_path)[1]


def test_a_study_of_other_versions_is_refused_with_the_way_out(tmp_path: Path) -> None:
    old, new = make_study(versions={"optuna": "5.0.0"}), make_study(versions={"optuna": "6.1.0"}, budget="9epochs")
    with pytest.raises(RequestError, match=r"optuna 5\.0\.0, and here is 6\.1\.0.*\n.*pip install 'optuna==5\.0\.0'"):
        continue_study(tmp_path, old, [], new)
    continued = continue_study(tmp_path, old, [], make_study(versions={"optuna": "5.3.0"}, budget="9epochs"))
    assert continued == replace(old, budget="9epochs")


def test_changed_study_is_shown_setting_by_setting(tmp_path: Path) -> None:
    old = make_study()
    new = make_study(
        search={"lr": "log(1e-4,1)", "weight_decay": "log(1e-5,1)"}, settings={**old.settings, "epochs": 3}
    )
    with pytest.raises(RequestError) as refused:
        continue_study(tmp_path, old, [], new)
    assert str(refused.value).splitlines()[1:-1] == [
        "    search.lr: log(1e-4,1e-1); this command: log(1e-4,1)",
        "    search.model.args.width: choice(16,32,64); this command: not set",
        "    settings.epochs: 9; this command: 3",
        "    search.weight_decay: not set; this command: log(1e-5,1)",
    ]


def test_study_of_an_earlier_version_is_continued_without_best(tmp_path: Path) -> None:
    make_study(best=None).write(tmp_path)
    stored, trials = read_study(tmp_path)
    assert continue_study(tmp_path, stored, trials, make_study()).best is None


@pytest.mark.parametrize(
    ("given", "stands", "more", "refusal"),
    [
        ({}, [(0, "paused", 0.1)] * 4, 8, ""),
        ({}, [(1, "completed", 0.1)] * 4, 5, ""),
        ({}, [(1, "completed", 0.1)] * 4, 3, "--trials 3: the study in .* has 4, and only grows"),
        ({"trials": 5}, [(0, "paused", 0.1)] * 5, 8, ""),
        ({"trials": 5}, [*[(0, "paused", 0.1)] * 4, (1, "waiting", 0.1)], 8, "by whole generations of 4"),
        ({"trials": 5, "order": "async"}, [*[(0, "paused", 0.1)] * 4, (1, "waiting", 0.1)], 8, ""),
        ({"trials": 5, "rungs": [9]}, [(0, "completed", 0.1)] * 5, 6, ""),
    ],
)
def test_study_grows_if_no_decision_changes(
    given: dict[str, Any], stands: list[tuple[int, str, float]], more: int, refusal: str, tmp_path: Path
) -> None:
    given = {"trials": 4, "generation": 4} | given
    old, new, trials = make_study(**given), make_study(**given | {"trials": more}), make_trials(*stands)
    if refusal:
        with pytest.raises(RequestError, match=refusal):
            continue_study(tmp_path, old, trials, new)
    else:
        assert continue_study(tmp_path, old, trials, new) == new


@pytest.mark.parametrize("content", ["nonsense", "a: [", ""])
def test_a_broken_study_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(content)
    with pytest.raises(RequestError, match=r"study\.yaml: can't be read"):
        read_study(tmp_path)
    make_study().write(tmp_path)
    Trial(1, {}).write(tmp_path)
    with pytest.raises(RequestError, match="trial 0 is missing"):
        read_study(tmp_path)


def test_the_forecast_counts_epochs_and_slots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = forecast(make_study(), 2, ENDS, 30.0)
    assert rows["epochs"] == "48, of 180 without rungs"
    assert rows["starts"] == "28, of 30.0 s each"
    assert rows["slot-hours"] == "0.633 to 1.03"  # of which 28 starts take 0.233
    assert rows["wall time"] == "19 min 0 s to 31 min 0 s"
    code, said = run(capsys, tmp_path / "none", "--dry-run")
    assert code == 0
    assert "epochs       5, of 9 without rungs" in said
    assert "starts       4, of 3.0 s each" in said
    assert not (tmp_path / "none").exists()


def test_the_report_of_a_study_under_way_and_where_its_lines_cross(tmp_path: Path) -> None:
    make_study(search={"lr": "log(0.01,1)", "m": "range(0,2) when o=a", "o": "choice(a,b)"}).write(tmp_path)
    (tmp_path / "base.yaml").write_text("epochs: 9\nbatch_size: 8\ngrad_accum_steps: 2\n")
    trial = Trial(0, {"lr": 0.1, "o": "b"}, 0, "paused", {1: [0.3]})
    places = [
        find_place(each, trial.params)
        for each in parse_search(["lr=log(0.01,1)", "o=choice(a,b)", "m=range(0,2) when o=a"])
    ]
    assert places[:2] == [0.5, 1.0]
    assert places[2] != places[2]
    make_study(search={"lr": "log(0.01,1)"}).write(tmp_path)
    trial.params = {"lr": 0.1}
    trial.write(tmp_path)
    (best,) = report_study(tmp_path, 1)["best"]
    assert best["command"].startswith("multigpu ")
    assert "--global-batch-size 16" in best["command"]
    assert "--lr 0.1" in best["command"]
    assert "grad-accum" not in best["command"]
