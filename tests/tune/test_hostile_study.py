"""A study whose files a stranger has written: they are data, and name nothing that is run, imported or written to."""

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from multigpu_cli.errors import RequestError
from multigpu_cli.tune import driver
from multigpu_cli.tune.report import report_study
from multigpu_cli.tune.space import check_params, parse_search
from multigpu_cli.tune.study import check_space, evaluate_trial, summarize
from multigpu_cli.tune.trials import read_study
from tests.support.run_training import run_training
from tests.tune.studies import FAKE, make_driver, make_study

SMALL: dict[str, Any] = {"trials": 3, "rungs": [1], "generation": 3}


@pytest.fixture(autouse=True)
def fake_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "FRONT_DOOR", FAKE)


def run_study(folder: Path) -> dict[str, Any]:
    own = make_driver(folder, make_study(**SMALL))
    return summarize(own, own.run())


@pytest.mark.parametrize(
    "planted",
    [
        {"notify": "/bin/sh -c 'touch owned'"},
        {"hook": ["evil:Hook"]},
        {"lr": 7.0},
        {"lr": "1e-3"},
        {"lr": True},
        {"model.args.width": 17},
        {"model.args.width": "16"},
    ],
)
def test_trial_is_refused_if_its_params_are_not_of_the_space(planted: dict[str, Any], tmp_path: Path) -> None:
    run_study(tmp_path / "study")
    file = tmp_path / "study/trials/0001/trial.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"params": content["params"] | planted}))
    for read in (read_study, lambda path: report_study(path, None)):
        with pytest.raises(RequestError, match=rf"0001/trial\.json: can't be read \(params: {next(iter(planted))}"):
            read(tmp_path / "study")


def test_params_need_each_active_setting_and_no_other() -> None:
    space = parse_search(["optimizer=choice(sgd,adamw)", "optimizer.args.momentum=range(0,0.9) when optimizer=sgd"])
    check_params(space, {"optimizer": "adamw"})
    check_params(space, {"optimizer": "sgd", "optimizer.args.momentum": 0.5})
    for wrong in ({}, {"optimizer": "sgd"}, {"optimizer": "adamw", "lr": 1.0}):
        with pytest.raises(ValueError, match="params: "):
            check_params(space, wrong)


def test_output_of_a_trial_is_not_written_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    trial = tmp_path / "study/trials/0000"
    trial.mkdir(parents=True)
    (trial / "output.log").symlink_to(victim)
    assert run_study(tmp_path / "study")["status"] == "completed"
    assert victim.read_text() == "mine"
    assert not (trial / "output.log").is_symlink()


def test_trial_folder_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "study/trials").mkdir(parents=True)
    (tmp_path / "study/trials/0000").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RequestError, match="leads elsewhere by a symbolic link"):
        run_study(tmp_path / "study")
    assert not list((tmp_path / "elsewhere").glob("output.log"))


@pytest.mark.parametrize("name", ["study.yaml", "study.jsonl", "base.yaml", ".optuna.journal.draft", "optuna.journal"])
def test_tune_writes_nothing_through_a_link_of_a_study(name: str, tmp_path: Path) -> None:
    run_study(tmp_path / "study")
    victim = tmp_path / "victim"
    victim.write_bytes((tmp_path / "study" / name).read_bytes() if (tmp_path / "study" / name).exists() else b"mine")
    before = victim.read_bytes()
    (tmp_path / "study" / name).unlink(missing_ok=True)
    (tmp_path / "study" / name).symlink_to(victim)
    with suppress(RequestError, OSError):  # the command itself refuses the link before that
        run_study(tmp_path / "study")
    assert victim.read_bytes() == before


def test_winner_is_evaluated_without_the_code_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_study(tmp_path / "study")
    notes = list[str]()
    own = make_driver(tmp_path / "study", make_study(**SMALL), said=notes)
    monkeypatch.undo()  # a real evaluation
    monkeypatch.chdir(tmp_path)
    Path("planted.py").write_text("open('owned', 'w').close()\nfrom tests.support.user_code import net\n")
    trial = own.study.run_folder(own.path, 0, 0)
    shutil.rmtree(trial)
    assert run_training(save_dir=str(trial), max_steps=2, data="digits", model="mlp").error == ""
    weights = torch.load(trial / "best.pt", weights_only=True)
    torch.save(weights | {"config": weights["config"] | {"model": "planted:net"}}, trial / "best.pt")
    assert evaluate_trial(own, 0) is None
    assert "names code that this command does not name: --model planted:net" in notes[-1]
    assert not Path("owned").exists()


def test_report_of_a_study_is_not_written_through_a_link(tmp_path: Path) -> None:
    run_study(tmp_path / "study")
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "study/report.png").symlink_to(victim)
    report_study(tmp_path / "study", None)
    assert victim.read_text() == "mine"


def test_check_of_the_space_imports_nothing_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from multigpu_cli.config.sources import resolve

    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    Path("json.py").write_text("open('owned', 'w').close()\nraise SystemExit(3)\n")
    space = parse_search(["lr=log(1e-4,1e-1)"])
    study = make_study(search={"lr": "log(1e-4,1e-1)"}, settings={"model": "mlp"}, best="val_accuracy:max")
    check_space(study, resolve({}, [], None), space, measure=False)
    assert not Path("owned").exists()
