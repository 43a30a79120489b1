from pathlib import Path

import numpy as np
import pytest

from multigpu_cli.monitor.curves import CurveHistory, RunData, list_plots, load_runs, smooth_values, thin_series
from tests.commands.runs import event, interrupted_run, lines, run_folder


def test_curves_hold_what_counts(tmp_path: Path) -> None:
    (run,) = load_runs([interrupted_run(tmp_path / "a", seed=7)])
    places, values = run.history.curves.series("mean_loss")
    assert places == list(range(1, 41))
    assert values[9] == 0.2
    assert run.history.curves.series("mean_loss", by="samples")[0][:2] == [25, 50]
    assert run.history.curves.series("comm_share") == ([], [])
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
    assert (run.status, run.history.curves.series("mean_loss"), run.per_worker("memory")) == ("not over", ([], []), [])


def test_names_are_as_long_as_it_takes(tmp_path: Path) -> None:
    folders = [run_folder(tmp_path / place, []) for place in ("x/one", "y/one", "y/two")]
    assert [run.name for run in load_runs(folders)] == ["x/one", "y/one", "y/two"]
    assert [run.name for run in load_runs(folders[1:])] == ["one", "two"]


def test_long_curves_are_thinned_to_their_end() -> None:
    """One outlier among a million points stays, and so does a gap."""
    places, values = np.arange(1_000_003.0), np.sin(np.arange(1_000_003.0))
    values[123_456], values[700_000], values[900_000:910_000] = 50, -50, np.inf
    thinned = thin_series(places, values)
    assert len(thinned[0]) < 1600
    assert (thinned[0][0], thinned[0][-1], thinned[1][-1]) == (0, 1_000_002, values[-1])
    assert thinned[0] == sorted(thinned[0])
    assert {(123_456.0, 50.0), (700_000.0, -50.0)} <= set(zip(*thinned, strict=True))
    assert 5 < thinned[1].count(np.inf) < 30
    assert thin_series(np.array([1.0]), np.array([2.0])) == ([1.0], [2.0])


def test_curves_forget_what_a_resume_replaced_and_keep_few_whole_lines() -> None:
    history = CurveHistory(keep=5)
    events = [event(0, "start"), *lines(1, 20, 0), event(30, "start", resumed_from="x"), event(31, "resume", step=16)]
    for each in [*events, *lines(17, 18, 30, scale=3.0, loss="NaN", memory={"min": 1, "mean": 2, "max": 3})]:
        history.add(each)
    assert history.curves.series("grad_norm") == ([float(at) for at in range(1, 19)], [1.0] * 16 + [3.0] * 2)
    assert history.curves.series("mean_loss")[1][-2:] == [np.inf] * 2
    assert (history.curves.series("memory 2"), history.curves.summarized) == (([17, 18], [3, 3]), True)
    assert 5 <= len(history.train) <= 10
    assert history.step == 18
    history.add({**history.train[18], "step": 19, "memory": [5, 6]})
    assert not history.curves.summarized, "two workers each have a curve again"


def test_the_curves_of_many_workers_share_the_points_of_a_plot() -> None:
    events = [event(0, "start"), *lines(1, 2000, 0, memory=list(range(1, 65)))]
    history = CurveHistory()
    for each in events:
        history.add(each)
    _, plots = list_plots([RunData("a", Path("a"), history, {}, {}, {})], 800)
    (memory,) = [plot for plot in plots if plot.name == "memory"]
    assert len(memory.lines) == 64
    assert 64 * 50 < sum(len(line.series[0]) for line in memory.lines) < 8 * 900


def test_smoothing_keeps_a_level_and_passes_over_what_is_no_number() -> None:
    assert smooth_values([3.0] * 400) == pytest.approx([3.0] * 400)
    with_a_gap = smooth_values([2.0] * 200 + [float("nan")] + [2.0] * 200)
    assert with_a_gap[200:] == pytest.approx([2.0] * 201)
    assert smooth_values([float("inf"), 1.0])[1] == 1.0
    jump = smooth_values([0.0] * 400 + [1.0] * 400)
    assert 0.2 < jump[407] < 0.9
