import math
from pathlib import Path

import pytest
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from multigpu_cli.commands.report import report
from multigpu_cli.commands.report.report import draw_plots
from multigpu_cli.monitor.curves import list_plots, load_runs
from multigpu_cli.monitor.plot_style import STYLE
from tests.commands.runs import PLAN, event, interrupted_run, lines, run_folder


def names(*folders: Path) -> list[str]:
    return [picture.name for picture in draw_plots(load_runs(folders))]


def test_there_is_a_picture_of_everything_that_has_data(tmp_path: Path) -> None:
    everything = "loss val_accuracy learning_rate throughput step_time waiting memory gradient_norm time_axis"
    assert names(interrupted_run(tmp_path / "a")) == [*everything.split(), "confusion"]
    assert names(run_folder(tmp_path / "c", [])) == []
    assert names(run_folder(tmp_path / "d", [event(0, "start", plan={})])) == ["time_axis"]


def test_runs_that_went_to_infinity_or_have_another_global_batch_are_drawn(tmp_path: Path) -> None:
    """Steps of different global batches do not compare, so they are laid over samples."""
    plan = {"global_batch_size": 64, "steps_per_epoch": 4, "samples": 100}
    wild = [event(0, "start", plan=plan), *lines(1, 50, 0), *lines(51, 60, 50, loss="NaN", grad_norm="Infinity")]
    runs = load_runs([interrupted_run(tmp_path / "a"), run_folder(tmp_path / "b", wild)])
    found = next(draw_plots(runs))
    assert found.says == "Loss (dashed: validation) over training samples seen: a, b"
    assert found.png.startswith(b"\x89PNG")
    assert b"<svg" in found.svg
    assert report._MARKS["resize"].encode() in found.svg, "the first went on with fewer workers"


def test_the_curve_is_that_of_the_mean_loss(tmp_path: Path) -> None:
    """A short last step of an epoch says little of it."""
    runs = load_runs([run_folder(tmp_path / "a", [event(0, "start"), *lines(1, 8, 0, loss=9.0, mean_loss=1.25)])])
    [loss] = [plot for plot in list_plots(runs)[1] if plot.name == "loss"]
    assert set(loss.lines[0].series[1]) == {1.25}


def test_names_are_shown_letter_by_letter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To matplotlib a pair of $ is a formula, and a leading _ keeps a curve out of the legend."""
    runs = load_runs([interrupted_run(tmp_path / name) for name in ("a $\\no{$ b", "_c d", "_c-d")])
    summary = runs[0].summary
    summary["per_class"] = [row | {"class": "$\\no{$"} for row in summary["per_class"]]
    by, (loss, *_) = list_plots(runs)
    monkeypatch.setattr(report, "list_plots", lambda _: (by, [loss]))  # the others' curves have the same names
    found = {picture.name: picture.svg.decode() for picture in draw_plots(runs)}
    assert {"confusion_a $\\no{$ b", "confusion__c d", "confusion__c-d"} <= found.keys(), "one file for each"
    assert all(f"<!-- {name} -->" in found["loss"] for name in ("a $\\no{$ b", " _c d", " _c-d"))
    assert "<!-- $\\no{$ -->" in found["confusion_a $\\no{$ b"]


def test_long_numbers_on_the_axis_are_whole(tmp_path: Path) -> None:
    """Those of a small learning rate, which begin at zero: 0.000125 and 0.0001475 lost figures at the edge."""
    for last in (1, 2):
        small = load_runs([run_folder(tmp_path / str(last), [event(0, "start"), *lines(1, last, 0, lr=1.464e-4)])])
        [rate] = [plot for plot in list_plots(small)[1] if plot.name == "learning_rate"]
        with rc_context(STYLE):
            figure, axes = report._new_figure("Learning rate")
            report._draw_plot(rate, axes)
            report._finish_axes(axes)
            box = axes.get_tightbbox(FigureCanvasAgg(figure).get_renderer())
            assert box is not None
            assert box.x0 >= 0


def test_no_picture_is_empty(tmp_path: Path) -> None:
    """Of a curve of nothing but NaN there is nothing to show; one point alone is a dot."""
    (lost,) = load_runs([run_folder(tmp_path / "a", [event(0, "start", plan=PLAN), *lines(1, 3, 0, loss="NaN")])])
    assert "loss" not in names(lost.folder)
    axes = Figure().add_subplot()
    for values in ([math.nan, 2.0], [1.0, 2.0]):
        report._draw_line(axes, ([1.0, 2.0], values), "black")
    assert [line.get_marker() for line in axes.lines] == ["o", "None"]
    (short,) = load_runs([run_folder(tmp_path / "b", [event(0, "start", plan=PLAN), *lines(1, 1, 0)])])
    assert "<!-- 0.98 -->" not in next(draw_plots([short])).svg.decode(), "steps are whole"
