"""The pictures of a report, drawn by matplotlib: small enough for a phone, sharp enough for paper."""

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from multigpu_cli.commands.report.data import RunData, Series, smooth_values
from multigpu_cli.monitor.plot_style import INK, STYLE, color_of_run, escape_text

_WAITS = (("data_wait_share", "for data"), ("comm_share", "for the wire"), ("straggler_share", "for slow workers"))
_SIZE = (4.4, 2.9)  # inches
_GIB = 2.0**-30


@dataclass(frozen=True)
class Picture:
    """One figure, as text for the page and as a file of its own.

    Attributes:
        name: of the PNG, without its ending.
        says: what it shows, for those who do not see it.
    """

    name: str
    says: str
    svg: bytes
    png: bytes


def draw_plots(runs: Sequence[RunData]) -> Iterator[Picture]:
    """Every picture that these runs have data for."""
    by, where = _choose_x_axis(runs)
    lines: list[tuple[str, str, Callable[[Axes], None]]] = [
        ("loss", "Loss" if len(runs) == 1 else "Loss (dashed: validation)", lambda axes: _draw_losses(axes, runs, by)),
        *_list_measures(runs, by),
        ("learning_rate", "Learning rate", lambda axes: _draw_curves(axes, runs, "lr", by)),
        ("throughput", "Training samples per second", lambda axes: _draw_curves(axes, runs, "samples_per_second", by)),
        ("step_time", "Milliseconds per optimizer step", lambda axes: _draw_curves(axes, runs, "step_ms", by)),
        ("waiting", "Share of time spent waiting (%)", lambda axes: _draw_waits(axes, runs, by)),
        ("memory", "Peak memory per worker (GiB)", lambda axes: _draw_per_worker(axes, runs, "memory", by, _GIB)),
        ("own_time", "Own milliseconds per step", lambda axes: _draw_per_worker(axes, runs, "own_ms", by, 1.0)),
        (
            "cpu_utilisation",
            "CPU threads at work (%)",
            lambda axes: _draw_per_worker(axes, runs, "cpu_utilisation", by, 1.0),
        ),
        (
            "gpu_utilisation",
            "GPU utilisation (%)",
            lambda axes: _draw_per_worker(axes, runs, "gpu_utilisation", by, 1.0),
        ),
        ("gpu_power", "GPU power (W)", lambda axes: _draw_per_worker(axes, runs, "gpu_power", by, 1.0)),
        (
            "gpu_temperature",
            "GPU temperature (°C)",
            lambda axes: _draw_per_worker(axes, runs, "gpu_temperature", by, 1.0),
        ),
        ("noise_scale", "Gradient noise scale (samples)", lambda axes: _draw_curves(axes, runs, "noise_scale", by)),
        ("gradient_norm", "Gradient norm", lambda axes: _draw_curves(axes, runs, "grad_norm", by, faint=True)),
    ]
    with rc_context(STYLE):
        for name, title, draw in lines:
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


def _choose_x_axis(runs: Sequence[RunData]) -> tuple[str, str]:
    """Steps of different global batches do not compare; samples do."""
    batches = {run.history.plan.get("global_batch_size") for run in runs}
    return ("step", "optimizer step") if len(batches) == 1 else ("samples", "training samples seen")


def _new_figure(title: str, height: float = _SIZE[1]) -> tuple[Figure, Axes]:
    usual = height == _SIZE[1]
    figure = Figure(figsize=(_SIZE[0], height), layout=None if usual else "constrained")
    axes = figure.add_subplot()
    if usual:  # the same frame in all of them, and quicker than finding one
        figure.subplots_adjust(left=0.18, right=0.96, top=0.88, bottom=0.18)
    axes.set_title(title)
    return figure, axes


def _draw_losses(axes: Axes, runs: Sequence[RunData], by: str) -> None:
    for number, run in enumerate(runs):
        alone = len(runs) == 1
        trained = run.curve("mean_loss", by=by)
        _draw_noisy(axes, trained, color_of_run(number), "training" if alone else escape_text(run.name))
        look = {"label": "validation"} if alone else {}
        shade = color_of_run(1) if alone else color_of_run(number)
        _draw_line(axes, run.evaluated("loss", by=by), shade, linestyle="--", marker="o", markersize=3, **look)
    _use_log_if_wide(axes)


def _list_measures(runs: Sequence[RunData], by: str) -> Iterator[tuple[str, str, Callable[[Axes], None]]]:
    """What the task measures beside the loss, on the validation split."""
    known = {"event", "time", "epoch", "step", "split", "samples", "loss"}
    evals = [event for run in runs for event in run.history.evals.values() if event["split"] == "val"]
    for name in dict.fromkeys(key for event in evals for key in event if key not in known):
        share = "accuracy" in name
        title = f"Validation {name.replace('_', ' ')}{' (%)' if share else ''}"

        def draw(axes: Axes, name: str = name, factor: float = 100.0 if share else 1.0) -> None:
            for number, run in enumerate(runs):
                series = run.evaluated(name, by=by, factor=factor)
                _draw_line(axes, series, color_of_run(number), marker="o", markersize=3, label=escape_text(run.name))

        yield f"val_{name}", title, draw


def _draw_curves(axes: Axes, runs: Sequence[RunData], field: str, by: str, *, faint: bool = False) -> None:
    for number, run in enumerate(runs):
        series = run.curve(field, by=by)
        if field == "lr":
            _draw_line(axes, series, color_of_run(number), label=escape_text(run.name))
        else:
            _draw_noisy(axes, series, color_of_run(number), escape_text(run.name))
    if faint:
        _use_log_if_wide(axes)
    elif axes.has_data():
        axes.set_ylim(bottom=0)


def _draw_waits(axes: Axes, runs: Sequence[RunData], by: str) -> None:
    for number, run in enumerate(runs):
        for at, (field, reason) in enumerate(_WAITS):
            shade = color_of_run(at) if len(runs) == 1 else color_of_run(number)
            label = reason if len(runs) == 1 else f"{escape_text(run.name)}, {reason}"
            series = run.curve(field, by=by, factor=100.0)
            _draw_line(axes, series, shade, linestyle=("-", "--", ":")[at], label=label, linewidth=1.4)
    if axes.has_data():
        axes.set_ylim(bottom=0)


def _draw_per_worker(axes: Axes, runs: Sequence[RunData], field: str, by: str, factor: float) -> None:
    for number, run in enumerate(runs):
        every = run.per_worker(field, by=by, factor=factor)
        for rank, series in enumerate(every):
            alone = len(runs) == 1
            name = escape_text(run.name) if rank == 0 and not alone else None
            label = f"rank {rank}" if alone and len(every) <= 8 else name
            _draw_line(axes, series, color_of_run(rank if alone else number), label=label, linewidth=1.4)
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
    if finite == 1:  # a line through one point would not be seen
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
    """When each run was at work, and what happened to it."""
    lanes = [run for run in runs if run.history.attempts]
    if not lanes:
        return
    figure, axes = _new_figure("What happened when", height=1.5 + 0.45 * len(lanes))
    longest = max(run.history.attempts[-1].last - run.history.attempts[0].start["time"] for run in lanes)
    unit, size = next((name, size) for name, size in _UNITS if longest >= 3 * size or size == 1)
    for lane, run in enumerate(lanes):
        zero, shade = run.history.attempts[0].start["time"], color_of_run(runs.index(run))
        for attempt in run.history.attempts:
            begun = (attempt.start["time"] - zero) / size
            axes.barh(lane, max(attempt.last - attempt.start["time"], 0) / size, 0.5, begun, color=shade, alpha=0.35)
        _draw_marks(
            axes, lane, [(event["time"] - zero) / size for event in run.history.checkpoints], "|", "#5d6d7e", "saved"
        )
        again = [(attempt.start["time"] - zero) / size for attempt in run.history.attempts[1:]]
        _draw_marks(axes, lane, again, ">", "#22303c", "started again")
        _draw_marks(
            axes, lane, [(event["time"] - zero) / size for event in run.history.faults], "X", "#c81d25", "fault"
        )
    axes.set_yticks(range(len(lanes)), [escape_text(run.name) for run in lanes])
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"{unit} since the first start")
    axes.grid(visible=False, axis="y")
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    if once:
        figure.legend(once.values(), once.keys(), loc="outside lower center", ncols=3)
    yield _save_picture(figure, "time_axis", "Attempts, checkpoints, restarts and faults on the time axis")


_UNITS = (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))


def _draw_marks(axes: Axes, lane: int, times: list[float], marker: str, shade: str, label: str) -> None:
    if times:
        axes.plot(times, [lane] * len(times), marker, color=shade, label=label, markersize=8, linestyle="none")


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
    svg, png = io.BytesIO(), io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None})
    figure.savefig(png, format="png", dpi=160)
    return Picture(name, says, svg.getvalue(), png.getvalue())
