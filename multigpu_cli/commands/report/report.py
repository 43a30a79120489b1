"""report: one page about one run, or a comparison of any number; the journals' numbers as plots and tables."""

import io
import re
import time
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from multigpu_cli.checkpoint.files import publish
from multigpu_cli.commands.options import writing_to
from multigpu_cli.commands.report import data
from multigpu_cli.commands.status import choose_key, collect_figures, explain_order, find_runs, order_runs
from multigpu_cli.config.regular_files import refuse_links
from multigpu_cli.monitor.curves import Plot, RunData, Series, list_marks, list_plots, load_runs, smooth_values
from multigpu_cli.monitor.plot_style import INK, STYLE, color_of_run, escape_text, save_png

_MOST_CURVES = 8  # colours that can be distinguished


@dataclass(frozen=True)
class ReportFiles:
    """The files of a report, the runs as the page lists them, and by what they are sorted, in words."""

    page: Path
    pictures: list[Path]
    runs: list[Path]
    order: str


@dataclass(frozen=True)
class Picture:
    """One figure, as SVG for the page and as a PNG file; `says` is for screen readers."""

    name: str
    says: str
    svg: bytes
    png: bytes


def write_report(names: Sequence[str], out: str | None, sort_by: str | None = None) -> ReportFiles:
    """Write the report of these runs, of more than eight a table and the best eight, to RUN/report or ./report."""
    runs = find_runs(names)
    loaded, order = _sort_runs(load_runs(runs), sort_by)
    folder = make_report_dir(runs, out)
    shown = loaded[:_MOST_CURVES]
    overview = data.tabulate_overview(loaded, order) if len(loaded) > len(shown) else None
    plots = list(draw_plots(shown))
    page, files = folder / "report.html", [folder / name for name in _name_files(plots)]
    with writing_to("--out", folder):
        for file, picture in zip(files, plots, strict=True):
            publish(file, picture.png)
        publish(page, render_page(shown, plots, overview).encode())
    return ReportFiles(page, files, [run.folder for run in loaded], order)


def _name_files(pictures: Sequence[Picture]) -> list[str]:
    """Return a file name for each picture, from whose name nothing but letters, digits and a few marks is taken.

    A picture is called after a metric, whose name stands in a journal that may be a stranger's: it must not lead to
    another folder. If two names become the same, the later picture gets a number.
    """
    names: list[str] = []
    for number, picture in enumerate(pictures):
        name = re.sub(r"[^\w@+-]", "_", picture.name)[:80]
        names.append(f"{name}_{number}.png" if f"{name}.png" in names else f"{name}.png")
    return names


def render_page(runs: Sequence[RunData], pictures: Sequence[Picture], overview: data.ReportTable | None = None) -> str:
    """The page, page.html filled in: plots inside, no scripts, readable on a phone and on paper."""
    folder = FileSystemLoader(Path(__file__).parent)
    page = Environment(loader=folder, autoescape=True, trim_blocks=True, undefined=StrictUndefined)
    per_run = {"Samples": data.tabulate_samples, "Classes": data.tabulate_classes}
    return page.get_template("page.html").render(
        title=f"{len(overview.rows)} runs" if overview else ", ".join(run.name for run in runs),
        contents=" · ".join(dict.fromkeys(str(run.history.plan.get("contents", "")) for run in runs)),
        date=time.strftime("%Y-%m-%d %H:%M"),
        runs=runs,
        pictures=[{"says": each.says, "base64": b64encode(each.svg).decode()} for each in pictures],
        overview=overview,
        several="h3" if len(runs) > 1 else "",
        per_run=[(name, [table for table in map(call, runs) if table.rows]) for name, call in per_run.items()],
        tables=data,
        color_of_run=color_of_run,
    )


def _sort_runs(runs: list[RunData], sort_by: str | None) -> tuple[list[RunData], str]:
    """The best first, and by what, in words; as they are where nobody asks and all have room."""
    figures = [collect_figures(run.summary, run.history) for run in runs]
    key = choose_key(figures) if sort_by is None and len(runs) > _MOST_CURVES else sort_by
    if key is None:
        return runs, ""
    return [runs[number] for number in order_runs(figures, key)], explain_order(key)


def make_report_dir(runs: Sequence[Path], out: str | None) -> Path:
    """Make the folder of a report."""
    if out is None and len(runs) == 1:
        refuse_links(runs[0])
    folder = Path(out) if out is not None else runs[0] / "report" if len(runs) == 1 else Path("report")
    with writing_to("--out", folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def format_report(written: ReportFiles) -> Iterator[str]:
    """Where the report is."""
    yield str(written.page)
    yield f"  with {len(written.pictures)} pictures, also as PNG files beside it"
    if written.order:
        yield f"  {written.order}: {written.runs[0]}"
    if len(written.runs) > _MOST_CURVES:
        yield f"  a table of {len(written.runs)} runs, and the curves of the first {_MOST_CURVES}"


_DASHES = ("-", "--", ":")
_MARKS = {"restart": "#9aa5ae", "resize": "#b5651d", "fault": "#c81d25"}
_SIZE = (4.4, 2.9)  # inches
_TIME_UNITS = (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))


def draw_plots(runs: Sequence[RunData]) -> Iterator[Picture]:
    """All plots that these runs have data for."""
    by, plots = list_plots(runs)
    marks = [mark for run in runs for mark in list_marks(run, by)]
    where = {"step": "optimizer step", "samples": "training samples seen"}[by]
    with rc_context(STYLE):
        for plot in plots:
            figure, axes = _new_figure(escape_text(plot.title))
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
        drawn = [float(value) for line in axes.lines for value in line.get_ydata()]  # type: ignore[union-attr, arg-type]
        positive = [value for value in drawn if 0 < value < float("inf")]
        if positive and max(positive) > 20 * min(positive):
            axes.set_yscale("log")
    elif plot.scale == "zero":
        axes.set_ylim(bottom=0)


def _draw_line(axes: Axes, series: Series, shade: str, **look: Any) -> None:
    finite = sum(map(isfinite, series[1]))
    if finite == 1:  # a line through one point is invisible
        look = {"marker": "o"} | look
    if finite:
        axes.plot(*series, color=shade, **look)


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
    axes.set(xlim=(0, None), ylim=(len(started) - 0.5, -0.5), xlabel=f"{unit} since the first start")
    axes.grid(visible=False, axis="y")
    handles, labels = axes.get_legend_handles_labels()
    if once := dict(zip(labels, handles, strict=True)):
        figure.legend(once.values(), once.keys(), loc="outside lower center", ncols=3)
    yield _save_picture(figure, "time_axis", "Attempts, checkpoints, restarts and faults on the time axis")


def _draw_confusion(run: RunData, *, alone: bool) -> Iterator[Picture]:
    counts = run.summary.get("confusion")
    if not counts or any(len(row) != len(counts) for row in counts):
        return
    rows = dict(enumerate(run.summary.get("per_class") or []))
    names = [str(rows.get(at, {}).get("class", at)) for at in range(len(counts))]
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
    axes.set(xlabel="predicted", ylabel="true")
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    name = "confusion" if alone else f"confusion_{run.name.replace('/', '-')}"
    yield _save_picture(figure, name, f"Confusion matrix of {run.name}: counts, shaded by the share of each true class")


def _save_picture(figure: Figure, name: str, says: str) -> Picture:
    svg = io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None})
    return Picture(name, says, svg.getvalue(), save_png(figure))
