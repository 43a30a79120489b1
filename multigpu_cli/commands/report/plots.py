"""The plots of a report, drawn by matplotlib: small enough for a phone, sharp enough for paper."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from multigpu_cli.monitor.curves import Plot, RunData, Series, list_marks, list_plots, smooth_values
from multigpu_cli.monitor.plot_style import INK, STYLE, color_of_run, escape_text, save_png

_DASHES = ("-", "--", ":")
_MARKS = {"restart": "#9aa5ae", "resize": "#b5651d", "fault": "#c81d25"}
_SIZE = (4.4, 2.9)  # inches
_TIME_UNITS = (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))


@dataclass(frozen=True)
class Picture:
    """One figure, as SVG for the page and as a PNG file; `says` is for screen readers."""

    name: str
    says: str
    svg: bytes
    png: bytes


def draw_plots(runs: Sequence[RunData]) -> Iterator[Picture]:
    """All plots that these runs have data for."""
    by, plots = list_plots(runs)
    marks = [mark for run in runs for mark in list_marks(run, by)]
    where = {"step": "optimizer step", "samples": "training samples seen"}[by]
    with rc_context(STYLE):
        for plot in plots:
            figure, axes = _new_figure(plot.title)
            _draw_plot(plot, axes)
            for mark in marks:
                axes.axvline(mark.at, color=_MARKS[mark.kind], linewidth=0.8, linestyle="--", zorder=1)
            axes.set_xlabel(where)
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
            _finish_axes(axes)
            says = f"{plot.title} over {where}: {', '.join(run.name for run in runs)}"
            yield _save_picture(figure, plot.name, says)
        yield from _draw_timeline(runs)
        for run in runs:
            yield from _draw_confusion(run, alone=len(runs) == 1)


def _new_figure(title: str, height: float = _SIZE[1]) -> tuple[Figure, Axes]:
    usual = height == _SIZE[1]
    figure = Figure(figsize=(_SIZE[0], height), layout=None if usual else "constrained")
    axes = figure.add_subplot()
    if usual:  # the same frame in all plots, and faster than a layout engine
        figure.subplots_adjust(left=0.18, right=0.96, top=0.88, bottom=0.18)
    axes.set_title(title)
    return figure, axes


def _draw_plot(plot: Plot, axes: Axes) -> None:
    for line in plot.lines:
        (places, values), shade, label = line.series, color_of_run(line.color), escape_text(line.label) or None
        if line.kind == "noisy" and len(values) > 40:
            _draw_line(axes, line.series, shade, alpha=0.25, linewidth=0.8)
            values = smooth_values(values)
        look: dict[str, Any] = {"label": label, "linestyle": _DASHES[line.dash]}
        look |= {"marker": "o", "markersize": 3} if line.kind == "dots" else {}
        _draw_line(axes, (places, values), shade, **look)
    if plot.scale == "wide":
        _use_log_if_wide(axes)
    elif plot.scale == "zero":
        axes.set_ylim(bottom=0)


def _draw_line(axes: Axes, series: Series, shade: str, **look: Any) -> None:
    finite = sum(map(isfinite, series[1]))
    if finite == 1:  # a line through one point is invisible
        look = {"marker": "o"} | look
    if finite:
        axes.plot(*series, color=shade, **look)


def _use_log_if_wide(axes: Axes) -> None:
    drawn = [float(value) for line in axes.lines for value in line.get_ydata()]  # type: ignore[union-attr, arg-type]
    positive = [value for value in drawn if 0 < value < float("inf")]
    if positive and max(positive) > 20 * min(positive):
        axes.set_yscale("log")


def _finish_axes(axes: Axes) -> None:
    axes.grid(visible=False, axis="x")
    if axes.get_yscale() == "linear":
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    handles, _ = axes.get_legend_handles_labels()
    if len(handles) > 1:
        axes.legend()


def _draw_timeline(runs: Sequence[RunData]) -> Iterator[Picture]:
    """When each run was active, and its checkpoints, restarts and faults."""
    started = [run for run in runs if run.history.attempts]
    if not started:
        return
    figure, axes = _new_figure("What happened when", height=1.5 + 0.45 * len(started))
    longest = max(run.history.attempts[-1].last - run.history.attempts[0].start["time"] for run in started)
    unit, size = next((name, size) for name, size in _TIME_UNITS if longest >= 3 * size or size == 1)
    for row, run in enumerate(started):
        history, shade = run.history, color_of_run(runs.index(run))
        zero = history.attempts[0].start["time"]
        for attempt in history.attempts:
            begun = (attempt.start["time"] - zero) / size
            axes.barh(row, max(attempt.last - attempt.start["time"], 0) / size, 0.5, begun, color=shade, alpha=0.35)
        marks = (
            (history.checkpoints, "|", "#5d6d7e", "saved"),
            ([attempt.start for attempt in history.attempts[1:]], ">", "#22303c", "started again"),
            (history.faults, "X", "#c81d25", "fault"),
        )
        for events, marker, color, label in marks:
            if events:
                times = [(event["time"] - zero) / size for event in events]
                axes.plot(times, [row] * len(times), marker, color=color, label=label, markersize=8, linestyle="none")
    axes.set_yticks(range(len(started)), [escape_text(run.name) for run in started])
    axes.set_ylim(len(started) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"{unit} since the first start")
    axes.grid(visible=False, axis="y")
    handles, labels = axes.get_legend_handles_labels()
    if once := dict(zip(labels, handles, strict=True)):
        figure.legend(once.values(), once.keys(), loc="outside lower center", ncols=3)
    yield _save_picture(figure, "time_axis", "Attempts, checkpoints, restarts and faults on the time axis")


def _draw_confusion(run: RunData, *, alone: bool) -> Iterator[Picture]:
    counts = run.summary.get("confusion")
    if not counts:
        return
    names = [str(row.get("class", at)) for at, row in enumerate(run.summary.get("per_class") or [{}] * len(counts))]
    few = len(counts) <= 12
    figure, axes = _new_figure(f"Confusion{'' if alone else f': {escape_text(run.name)}'}", height=4.0)
    shares = [[count / (sum(row) or 1) for count in row] for row in counts]
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for true, row in enumerate(counts if few else []):
        for predicted, count in enumerate(row):
            if count:
                ink = "white" if shares[true][predicted] > 0.6 else INK
                axes.text(predicted, true, str(count), ha="center", va="center", color=ink, fontsize=8)
    short = [escape_text(name if len(name) <= 12 else name[:11] + "…") for name in names]
    if len(counts) <= 40:
        axes.set_xticks(range(len(counts)), short, rotation=90 if max(map(len, short)) > 2 else 0)
        axes.set_yticks(range(len(counts)), short)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    name = "confusion" if alone else f"confusion_{run.name.replace('/', '-')}"
    yield _save_picture(figure, name, f"Confusion matrix of {run.name}: counts, shaded by the share of each true class")


def _save_picture(figure: Figure, name: str, says: str) -> Picture:
    svg = io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None})
    return Picture(name, says, svg.getvalue(), save_png(figure))
