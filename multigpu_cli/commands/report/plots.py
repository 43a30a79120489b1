"""The plots of a report, drawn by matplotlib: small enough for a phone, sharp enough for paper."""

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from multigpu_cli.commands.report.data import RunData, Series, smooth_values
from multigpu_cli.monitor.format import format_label
from multigpu_cli.monitor.plot_style import INK, STYLE, color_of_run, escape_text, save_png

_WAITS = (("data_wait_share", "for data"), ("comm_share", "for the wire"), ("straggler_share", "for slow workers"))
_SIZE = (4.4, 2.9)  # inches
_TIME_UNITS = (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))
_Plot = tuple[str, str, Callable[[Axes], None]]  # file, title, what draws the data


@dataclass(frozen=True)
class Picture:
    """One figure, as SVG for the page and as a PNG file; `says` is for screen readers."""

    name: str
    says: str
    svg: bytes
    png: bytes


def draw_plots(runs: Sequence[RunData]) -> Iterator[Picture]:
    """All plots that these runs have data for."""
    batches = {run.history.plan.get("global_batch_size") for run in runs}
    # steps of different global batches can't be compared; samples can
    by, where = ("step", "optimizer step") if len(batches) == 1 else ("samples", "training samples seen")
    with rc_context(STYLE):
        for name, title, draw in _list_plots(runs, by):
            figure, axes = _new_figure(title)
            draw(axes)
            if axes.has_data():
                axes.set_xlabel(where)
                axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
                _finish_axes(axes)
                yield _save_picture(figure, name, f"{title} over {where}: {', '.join(run.name for run in runs)}")
        yield from _draw_timeline(runs)
        for run in runs:
            yield from _draw_confusion(run, alone=len(runs) == 1)


def _list_plots(runs: Sequence[RunData], by: str) -> list[_Plot]:
    curves, per_worker = partial(_draw_curves, runs, by), partial(_draw_per_worker, runs, by)
    return [
        ("loss", "Loss" if len(runs) == 1 else "Loss (dashed: validation)", partial(_draw_losses, runs, by)),
        *_list_metrics(runs, by),
        ("learning_rate", "Learning rate", partial(curves, "lr")),
        ("throughput", "Training samples per second", partial(curves, "samples_per_second")),
        ("tokens", "Learned tokens per second", partial(curves, "tokens_per_second")),
        ("all_tokens", "All tokens per second", partial(curves, "all_tokens_per_second")),
        ("padding", "Padding, as a share of all places", partial(curves, "padding_share")),
        ("step_time", "Milliseconds per optimizer step", partial(curves, "step_ms")),
        ("waiting", "Share of time spent waiting (%)", partial(_draw_waits, runs, by)),
        ("memory", "Peak memory per worker (GiB)", partial(per_worker, "memory", 2.0**-30)),
        ("own_time", "Own milliseconds per step", partial(per_worker, "own_ms", 1.0)),
        ("cpu_utilisation", "CPU threads at work (%)", partial(per_worker, "cpu_utilisation", 1.0)),
        ("gpu_utilisation", "GPU utilisation (%)", partial(per_worker, "gpu_utilisation", 1.0)),
        ("gpu_power", "GPU power (W)", partial(per_worker, "gpu_power", 1.0)),
        ("gpu_temperature", "GPU temperature (°C)", partial(per_worker, "gpu_temperature", 1.0)),
        ("noise_scale", "Gradient noise scale (samples)", partial(curves, "noise_scale")),
        ("gradient_norm", "Gradient norm", partial(curves, "grad_norm")),
    ]


def _new_figure(title: str, height: float = _SIZE[1]) -> tuple[Figure, Axes]:
    usual = height == _SIZE[1]
    figure = Figure(figsize=(_SIZE[0], height), layout=None if usual else "constrained")
    axes = figure.add_subplot()
    if usual:  # the same frame in all plots, and faster than a layout engine
        figure.subplots_adjust(left=0.18, right=0.96, top=0.88, bottom=0.18)
    axes.set_title(title)
    return figure, axes


def _draw_losses(runs: Sequence[RunData], by: str, axes: Axes) -> None:
    alone = len(runs) == 1
    for number, run in enumerate(runs):
        trained = run.curve("mean_loss", by=by)
        _draw_noisy(axes, trained, color_of_run(number), "training" if alone else escape_text(run.name))
        look = {"label": "validation"} if alone else {}
        shade = color_of_run(1) if alone else color_of_run(number)
        _draw_line(axes, run.evaluated("loss", by=by), shade, linestyle="--", marker="o", markersize=3, **look)
    _use_log_if_wide(axes)


def _list_metrics(runs: Sequence[RunData], by: str) -> Iterator[_Plot]:
    """The task's metrics beside the loss, on the validation split."""
    known = {"event", "time", "epoch", "step", "split", "samples", "loss"}
    evals = [event for run in runs for event in run.history.evals.values() if event["split"] == "val"]
    for name in dict.fromkeys(key for event in evals for key in event if key not in known):
        unit, factor = (" (%)", 100.0) if "accuracy" in name else ("", 1.0)
        yield f"val_{name}", f"Validation {format_label(name)}{unit}", partial(_draw_metric, runs, by, name, factor)


def _draw_metric(runs: Sequence[RunData], by: str, name: str, factor: float, axes: Axes) -> None:
    for number, run in enumerate(runs):
        series = run.evaluated(name, by=by, factor=factor)
        _draw_line(axes, series, color_of_run(number), marker="o", markersize=3, label=escape_text(run.name))


def _draw_curves(runs: Sequence[RunData], by: str, field: str, axes: Axes) -> None:
    for number, run in enumerate(runs):
        series = run.curve(field, by=by)
        if field == "lr":
            _draw_line(axes, series, color_of_run(number), label=escape_text(run.name))
        else:
            _draw_noisy(axes, series, color_of_run(number), escape_text(run.name))
    if field == "grad_norm":
        _use_log_if_wide(axes)
    else:
        _start_at_zero(axes)


def _draw_waits(runs: Sequence[RunData], by: str, axes: Axes) -> None:
    for number, run in enumerate(runs):
        for at, (field, reason) in enumerate(_WAITS):
            shade = color_of_run(at) if len(runs) == 1 else color_of_run(number)
            label = reason if len(runs) == 1 else f"{escape_text(run.name)}, {reason}"
            series = run.curve(field, by=by, factor=100.0)
            _draw_line(axes, series, shade, linestyle=("-", "--", ":")[at], label=label, linewidth=1.4)
    _start_at_zero(axes)


def _draw_per_worker(runs: Sequence[RunData], by: str, field: str, factor: float, axes: Axes) -> None:
    alone = len(runs) == 1
    for number, run in enumerate(runs):
        every = run.per_worker(field, by=by, factor=factor)
        for rank, series in enumerate(every):
            name = escape_text(run.name) if rank == 0 and not alone else None
            label = name
            if alone and len(every) <= 8:
                label = ("least", "mean", "greatest")[rank] if run.has_many_workers else f"rank {rank}"
            _draw_line(axes, series, color_of_run(rank if alone else number), label=label, linewidth=1.4)
    _start_at_zero(axes)


def _start_at_zero(axes: Axes) -> None:
    if axes.has_data():
        axes.set_ylim(bottom=0)


def _draw_noisy(axes: Axes, series: Series, shade: str, label: str) -> None:
    places, values = series
    if len(values) > 40:
        _draw_line(axes, series, shade, alpha=0.25, linewidth=0.8)
        values = smooth_values(values)
    _draw_line(axes, (places, values), shade, label=label)


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
