"""The driver with trials that take no time: the same study on any slots and after any kill, faults, budget, seeds."""

import os
import re
import signal
import sys
import time
from datetime import datetime
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import Any

import optuna
import pytest

from multigpu_cli.checkpoint.files import lock_folder
from multigpu_cli.errors import RequestError, TrainingError
from multigpu_cli.monitor.journal import read_events
from multigpu_cli.tune import driver
from multigpu_cli.tune.scheduler import measure_use
from multigpu_cli.tune.study import summarize
from multigpu_cli.tune.trials import continue_study, read_study
from tests.tune.studies import FAKE, find_children, make_driver, make_study, read_trials, wait_until_gone

SMALL: dict[str, Any] = {"trials": 6, "generation": 3, "rungs": [1, 3, 9], "sampler": "random"}


@pytest.fixture(autouse=True)
def fake_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "FRONT_DOOR", FAKE)
    monkeypatch.setattr(sys, "executable", sys._base_executable)  # type: ignore[attr-defined]  # it starts at once


def run_study(folder: Path, slots: int = 1, said: list[str] | None = None, **given: Any) -> dict[str, Any]:
    own = make_driver(folder, make_study(**SMALL | given), slots, said=said)
    return summarize(own, own.run())


def test_one_two_and_three_slots_give_the_same_trials_and_winner_which_is_tested_once(tmp_path: Path) -> None:
    folders = [tmp_path / str(slots) for slots in (1, 2, 3)]
    found = [run_study(folder, slots, sampler="tpe") for slots, folder in enumerate(folders, 1)]
    assert found[0]["best"] == found[1]["best"] == found[2]["best"]
    assert found[0]["best"]["test"] == {"accuracy": 0.5}
    assert found[0]["epochs"] == 2 * (3 + 2 + 6)
    assert read_trials(folders[0]) == read_trials(folders[1]) == read_trials(folders[2])
    states = [trial["state"] for trial in read_trials(folders[0])]
    assert sorted(states) == ["completed"] * 2 + ["paused"] * 4
    assert all(0 <= each["idle_share"] < 1 for each in found)
    assert all(0.5 < each["start_share"] + each["idle_share"] <= 1 for each in found)  # trials take no time
    widest = max(event["slots"] for event in read_events(folders[2] / "study.jsonl") if event["event"] == "start")
    assert widest > 1  # the last of a generation has inherited


def load_journal(folder: Path) -> optuna.Study:
    """The study in optuna.journal, which has the name of its folder."""
    backend = optuna.storages.journal.JournalFileBackend(str(folder / "optuna.journal"))
    return optuna.load_study(study_name=folder.name, storage=optuna.storages.JournalStorage(backend))


@pytest.mark.parametrize(
    "given",
    [
        {"trials": 3},
        {},
        {"sampler": "tpe"},
        {"order": "async"},
        {"objectives": ["val_loss:min"], "search": {"model.args.width": "choice(16,32,64)"}},
        {"objectives": ["val_accuracy:max", "val_loss:min"], "rungs": [9]},
    ],
    ids=["one generation", "several", "tpe", "async", "minimized", "two objectives"],
)
def test_optuna_journal_has_all_results_and_times(given: dict[str, Any], tmp_path: Path) -> None:
    summary, began = run_study(tmp_path, slots=2, **given), datetime.now()
    exported = load_journal(tmp_path)
    assert [(trial.number, trial.params) for trial in exported.trials] == [
        (trial["number"], trial["params"]) for trial in summary["trials"]
    ]
    if summary["front"][1:]:
        assert sorted(trial.number for trial in exported.best_trials) == sorted(summary["front"])
    best = exported.trials[summary["best"]["number"]]
    assert best in exported.best_trials
    assert best.values == (
        summary["best"]["value"] if "objectives" in given and given["objectives"][1:] else [summary["best"]["value"]]
    )
    times = [event["time"] for event in read_events(tmp_path / "study.jsonl") if event.get("trial") == best.number]
    assert best.datetime_start is not None
    assert best.datetime_start.timestamp() == pytest.approx(times[0], abs=1e-3)
    assert best.datetime_complete is not None
    assert best.datetime_complete.timestamp() == pytest.approx(times[-1], abs=1e-3)
    assert best.datetime_start < best.datetime_complete < began


def test_optuna_journal_is_repaired_by_the_same_command(tmp_path: Path) -> None:
    run_study(tmp_path)
    (tmp_path / "optuna.journal").write_text("")
    summary = run_study(tmp_path)
    assert load_journal(tmp_path).best_trial.number == summary["best"]["number"]


def test_optuna_journal_has_each_value_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that is killed after a value of its only generation has exported this value."""
    known: list[int] = []

    def look(own: driver.Driver) -> None:
        widen(own)
        if (tmp_path / "optuna.journal").exists():
            known.append(sum(bool(trial.intermediate_values) for trial in load_journal(tmp_path).trials))

    widen = driver.Driver._widen
    monkeypatch.setattr(driver.Driver, "_widen", look)
    run_study(tmp_path, trials=3, rungs=[1, 9])
    assert {1, 2} <= set(known)


COMPLETED, STOPPED = 0, 3


def start_study(folder: Path, hangup: Any = signal.SIG_DFL, epoch: str = "0.05", **environ: str) -> BaseProcess:
    """A study on two slots in a forked process, whose exit code says how it ended."""

    def drive() -> None:
        signal.signal(signal.SIGHUP, hangup)
        signal.signal(signal.SIGINT, lambda *_: None)  # which the driver puts back: one more may come after its end
        study = make_study(trials=6, generation=3, rungs=[1, 3, 9])
        own = make_driver(folder, study, 2, {"FAKE_EPOCH": epoch} | environ)
        sys.exit({"completed": COMPLETED, "stopped": STOPPED}[own.run()])

    process = get_context("fork").Process(target=drive, daemon=True)
    process.start()
    return process


@pytest.mark.slow
def test_a_study_that_is_killed_at_random_ends_as_undisturbed(tmp_path: Path) -> None:
    run_study(tmp_path / "calm", sampler="tpe")
    random, folder, kills = Random(7), tmp_path / "killed", 0
    while True:
        process = start_study(folder)
        wait_for_lines(folder / "study.jsonl", process, random.randrange(1, 5))
        if kills >= 3 or not process.is_alive():
            break
        children = find_children(process.pid or 0)
        process.kill()
        process.join()
        kills += 1
        for child in children:
            wait_until_gone(child)  # the kernel has ended it with its driver
    process.join()
    assert process.exitcode == COMPLETED
    assert kills == 3
    assert load_journal(folder).best_trial.number == load_journal(tmp_path / "calm").best_trial.number
    assert read_trials(folder) == read_trials(tmp_path / "calm")


def wait_for_lines(file: Path, process: BaseProcess, count: int) -> None:
    """Until so many more lines are there, or the process has ended."""
    before = len(list(read_events(file))) if file.exists() else 0
    while process.is_alive() and (not file.exists() or len(list(read_events(file))) < before + count):
        time.sleep(0.01)


def test_a_trial_that_is_killed_goes_on_and_one_that_always_dies_has_failed(tmp_path: Path) -> None:
    given: dict[str, Any] = {"search": {"label_smoothing": "choice(0.4)"}, "trials": 1}
    assert run_study(tmp_path / "once", **given)["best"]["epochs"] == 9
    broken = tmp_path / "broken.py"
    broken.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    driver.FRONT_DOOR = broken
    own = make_driver_of(broken, tmp_path / "always", **given)
    with pytest.raises(TrainingError, match="all of the first 1 trials failed: exit code -9"):
        own.run()
    assert sum(event["event"] == "start" for event in read_events(tmp_path / "always" / "study.jsonl")) == 3


def make_driver_of(front_door: Path, folder: Path, **given: Any) -> driver.Driver:
    driver.FRONT_DOOR = FAKE
    own = make_driver(folder, make_study(**SMALL | given))
    driver.FRONT_DOOR = front_door
    return own


def test_out_of_memory_has_failed_nan_is_bad_and_the_first_generation_all_failing_is_the_end(tmp_path: Path) -> None:
    found = run_study(tmp_path / "mixed", search={"label_smoothing": "choice(0.2,0.1,0.0)"}, sampler="grid", trials=3)
    assert [trial["state"] for trial in found["trials"]] == ["diverged", "failed", "completed"]  # in the first's place
    assert [trial["error"] for trial in found["trials"]] == ["NaN after epoch 3", "OutOfMemory: out of memory", ""]
    assert list(found["trials"][0]["values"]) == [1]  # the last finite rung
    with pytest.raises(TrainingError, match=r"all of the first 3 trials failed: OutOfMemory.*\n.*another --save-dir"):
        run_study(tmp_path / "all", search={"label_smoothing": "choice(0.1)"})


def test_a_full_disk_pauses_the_study_and_fails_no_trial(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"disk of .* is full.*\n.*free some space"):
        run_study(tmp_path, search={"label_smoothing": "choice(0.3)"})
    assert {trial["state"] for trial in read_trials(tmp_path)} == {"waiting"}


@pytest.mark.parametrize(("budget", "most"), [("10epochs", 11), pytest.param("3epochs", 3, marks=pytest.mark.slow)])
def test_a_budget_is_overshot_by_less_than_a_rung(tmp_path: Path, budget: str, most: int) -> None:
    found = run_study(tmp_path, budget=budget)
    assert found["status"] == "budget"
    assert found["epochs"] == most
    assert found["best"] is not None
    assert run_study(tmp_path, budget=None)["status"] == "completed"  # a greater one: it goes on


def test_slot_hours_are_measured(tmp_path: Path) -> None:
    found = run_study(tmp_path, budget="1e-9slot-hours")
    assert (found["status"], found["epochs"]) == ("budget", 3)
    assert found["slot_hours"] > 1e-9


def test_several_seeds_count_by_their_mean(tmp_path: Path) -> None:
    found = run_study(tmp_path, slots=3, seeds=3, trials=1, rungs=[9], search={"lr": "choice(0.01)"})
    (trial,) = found["trials"]
    assert trial["values"][9] == pytest.approx((1 - 0.002 - 0.002 * 16) * (1 - 0.5**9), rel=1e-5)  # of seeds 1, 2, 3
    assert sorted(path.name for path in (tmp_path / "trials/0000").iterdir()) == [
        "seed-1",
        "seed-2",
        "seed-3",
        "trial.json",
    ]
    assert len(set(trial["fingerprint"].split())) == 3


def test_trial_counts_by_its_best_epoch(tmp_path: Path) -> None:
    """best.pt has the weights of that epoch, and is tested. In studies of earlier versions the last epoch counts."""
    given: dict[str, Any] = {"trials": 1, "search": {"label_smoothing": "choice(0.5)"}}
    (trial,) = run_study(tmp_path / "new", **given)["trials"]
    (old,) = run_study(tmp_path / "old", **given, best=None)["trials"]
    top = 1 - 0.001 - 0.002 * 16
    assert trial["values"] == pytest.approx({1: top / 2, 3: top * 3 / 4, 9: top * 3 / 4}, rel=1e-5)
    assert old["values"] == pytest.approx({1: top / 2, 3: top / 3, 9: top / 9}, rel=1e-5)


@pytest.mark.parametrize(
    ("given", "fewer"),
    [({"sampler": "tpe"}, 3), ({"rungs": [9]}, 2), ({"rungs": [9], "generation": 4, "sampler": "tpe"}, 5)],
)
def test_grown_study_equals_one_of_so_many_trials(given: dict[str, Any], fewer: int, tmp_path: Path) -> None:
    study = make_study(**SMALL | given)
    run_study(tmp_path / "grown", **given | {"trials": fewer})
    continued = continue_study(tmp_path / "grown", *read_study(tmp_path / "grown"), study)
    own = make_driver(tmp_path / "grown", continued, 2)
    grown, whole = summarize(own, own.run()), run_study(tmp_path / "whole", **given)
    assert len(whole["trials"]) == SMALL["trials"]
    assert grown["best"] == whole["best"]
    files = [sorted((tmp_path / name).glob("trials/*/trial.json")) for name in ("grown", "whole")]
    assert [file.read_bytes() for file in files[0]] == [file.read_bytes() for file in files[1]]


def test_an_objective_that_no_evaluation_has_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"--objective val_acc.*\n.*did you mean 'val_accuracy'"):
        run_study(tmp_path, objectives=["val_acc:max"])


def test_several_objectives_run_whole_and_have_a_front(tmp_path: Path) -> None:
    goals: dict[str, Any] = {
        "objectives": ["val_accuracy:max", "val_loss:min"],
        "rungs": [9],
        "sampler": "tpe",
        "trials": 9,
    }
    found = run_study(tmp_path, slots=2, **goals)
    assert {trial["state"] for trial in found["trials"]} == {"completed"}
    width = {trial["number"]: trial["params"]["model.args.width"] for trial in found["trials"]}
    assert sorted({width[number] for number in found["front"]}) == [16, 32]  # 64 is worse in both
    assert found["best"]["number"] == found["front"][0]


def test_a_signal_stops_all_runs_and_the_study_goes_on(tmp_path: Path) -> None:
    process = start_study(tmp_path)
    wait_for_lines(tmp_path / "study.jsonl", process, 3)
    children = find_children(process.pid or 0)
    process.terminate()
    process.join()
    assert process.exitcode == STOPPED
    for child in children:
        assert not Path(f"/proc/{child}").exists()
    assert run_study(tmp_path, sampler="tpe")["status"] == "completed"


def test_nohup_keeps_a_study_from_a_hangup_and_a_second_ctrl_c_ends_runs_that_do_not_stop(tmp_path: Path) -> None:
    process = start_study(tmp_path, signal.SIG_IGN, epoch="60", FAKE_DEAF="1")
    wait_for_lines(tmp_path / "study.jsonl", process, 3)
    (ignored,) = re.findall(r"SigIgn:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())
    assert int(ignored, 16) & 1 << signal.SIGHUP - 1
    until = time.monotonic() + 30
    while process.is_alive() and time.monotonic() < until:
        os.kill(process.pid or 0, signal.SIGINT)
        time.sleep(0.05)
    process.kill()
    process.join()
    assert process.exitcode == STOPPED


def test_the_journal_is_read_for_hours_only_where_something_is_to_be_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    monkeypatch.setattr(driver, "measure_use", lambda events: (reads.append(1), measure_use(events))[1])
    own = make_driver(tmp_path, make_study(**SMALL | {"trials": 2, "budget": "9slot-hours"}), 1, {"FAKE_EPOCH": "0.1"})
    assert own.run() == "completed"
    assert len(reads) < 10  # and not twenty times a second


def test_a_run_that_a_driver_on_another_machine_left_is_waited_for(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(driver, "_PATIENCE", 0.1)
    with lock_folder(tmp_path / "trials/0000"), pytest.raises(TrainingError, match="is still at work"):
        run_study(tmp_path)


def test_out_of_order_all_slots_work_and_one_trial_at_least_ends(tmp_path: Path) -> None:
    found = run_study(tmp_path, slots=3, order="async", sampler="tpe")
    assert found["status"] == "completed"
    assert len(found["trials"]) == 6
    assert "completed" in {trial["state"] for trial in found["trials"]}


def test_a_run_is_widened_where_that_is_worth_it(tmp_path: Path) -> None:
    """Two runs on two slots; one fails at once, and the other goes on with both."""
    said: list[str] = []
    given: dict[str, Any] = {
        "search": {"label_smoothing": "choice(0.0,0.1)"},
        "sampler": "grid",
        "trials": 2,
        "rungs": [9],
    }
    own = make_driver(tmp_path, make_study(**SMALL | given), 2, {"FAKE_EPOCH": "0.7"}, said)
    own._speeds.starts.append(0.1)
    assert own.run() == "completed"
    assert "trial 0: goes on with 2 slots" in said
    starts = [event["slots"] for event in read_events(tmp_path / "study.jsonl") if event["event"] == "start"]
    assert starts == [1, 1, 2]
    assert own.trials[0].state == "completed"
