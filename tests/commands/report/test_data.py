from pathlib import Path

import pytest

from multigpu_cli.commands.report.data import load_runs, smooth_values, thin_series
from tests.commands.runs import event, interrupted_run, run_folder


def test_curves_hold_what_counts(tmp_path: Path) -> None:
    (run,) = load_runs([interrupted_run(tmp_path / "a", seed=7)])
    places, values = run.curve("loss")
    assert places == list(range(1, 41))
    assert values[9] == 0.2
    assert run.curve("loss", by="samples")[0][:2] == [25, 50]
    assert run.curve("comm_share") == ([], [])
    first, second = run.per_worker("memory", factor=2.0**-30)
    assert (first[1][0], second[1][0]) == (1, 2)
    assert run.evaluated("accuracy", factor=100.0)[1][0] == 75
    assert run.evaluated("accuracy", by="samples")[0][:2] == [100, 200]
    assert (run.status, run.settings["seed"], run.summary["status"]) == ("completed", 7, "completed")


def test_evaluations_in_the_middle_of_an_epoch_find_their_samples(tmp_path: Path) -> None:
    plan = {"steps_per_epoch": 4, "samples": 100, "global_batch_size": 32}
    told_of = event(1, "eval", step=7, epoch=2, split="val", loss=1.0)
    (run,) = load_runs([run_folder(tmp_path / "a", [event(0, "start", plan=plan), told_of])])
    assert run.evaluated("loss", by="samples") == ([100 + 3 * 32], [1.0])


def test_samples_that_were_dropped_or_left_out_are_not_counted(tmp_path: Path) -> None:
    """Of 74 samples an epoch drops 10; at step 4 half of its samples had been left out, as the line there says."""
    plan = {"steps_per_epoch": 2, "samples": 74, "global_batch_size": 32}
    evals = [event(9, "eval", step=step, epoch=step // 2, split="val", loss=1.0) for step in (2, 4, 7)]
    events = [event(0, "start", plan=plan), event(1, "train", step=4, samples=96), *evals]
    (run,) = load_runs([run_folder(tmp_path / "a", events)])
    assert run.evaluated("loss", by="samples")[0] == [64, 96, 96 + 3 * 32]


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    (run,) = load_runs([run_folder(tmp_path / "a", [])])
    assert (run.status, run.curve("loss"), run.per_worker("memory")) == ("not over", ([], []), [])


def test_names_are_as_long_as_it_takes(tmp_path: Path) -> None:
    folders = [run_folder(tmp_path / place, []) for place in ("x/one", "y/one", "y/two")]
    assert [run.name for run in load_runs(folders)] == ["x/one", "y/one", "y/two"]
    assert [run.name for run in load_runs(folders[1:])] == ["one", "two"]


def test_long_curves_are_thinned_to_their_end() -> None:
    places, values = thin_series([float(at) for at in range(10_001)], [float(-at) for at in range(10_001)])
    assert len(places) < 1600
    assert (places[0], places[-1], values[-1]) == (0, 10_000, -10_000)
    assert thin_series([1.0], [2.0]) == ([1.0], [2.0])


def test_smoothing_keeps_a_level_and_passes_over_what_is_no_number() -> None:
    assert smooth_values([3.0] * 400) == pytest.approx([3.0] * 400)
    with_a_gap = smooth_values([2.0] * 200 + [float("nan")] + [2.0] * 200)
    assert with_a_gap[200:] == pytest.approx([2.0] * 201)
    assert smooth_values([float("inf"), 1.0])[1] == 1.0
    jump = smooth_values([0.0] * 400 + [1.0] * 400)
    assert 0.2 < jump[407] < 0.9
