"""The curves of runs: the numbers of journals as columns, thinned to what can be seen, and all plots made of them.

`report` draws these plots with matplotlib, `watch` in the browser.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from multigpu_cli.config.resume_rules import flatten_settings
from multigpu_cli.monitor.format import format_label, list_values
from multigpu_cli.monitor.history import JOURNAL, PLAN, History, load_config, load_summary
from multigpu_cli.monitor.journal import Event, read_events, read_json

Series = tuple[list[float], list[float]]
_MOST_POINTS = 1500
_PER_RUN = (
    *("mean_loss", "lr", "grad_norm", "noise_scale", "step_ms", "data_wait_share", "comm_share", "straggler_share"),
    *("samples", "samples_per_second", "tokens_per_second", "all_tokens_per_second", "padding_share"),
)
_PER_WORKER = ("memory", "own_ms", "cpu_utilisation", "gpu_utilisation", "gpu_power", "gpu_temperature")
_WAITS = (("data_wait_share", "for data"), ("comm_share", "for the wire"), ("straggler_share", "for slow workers"))


class Curves:
    """The numbers of `train` lines that plots show: a column for each, 8 bytes per line; NaN if a line lacks it."""

    def __init__(self) -> None:
        self.steps = array("d")  # the optimizer step of each line, ascending
        self.workers: dict[str, int] = {}  # by field, the values in the newest line that has one for each worker
        self.summarized = False  # whether the newest line has least, mean and greatest in place of each worker's value
        self._columns: dict[str, array[float]] = {}
        self.before: Curves | None = None  # lines of earlier steps, where these are the end of a long journal

    def add(self, event: Event) -> None:
        """Add a line; it replaces those of its step and of later ones."""
        if self.steps and event["step"] <= self.steps[-1]:
            self.forget_after(event["step"] - 1)
        self.steps.append(event["step"])
        for name in _PER_RUN:
            if event.get(name) is not None:
                self._append(name, event[name])
        for name in _PER_WORKER:
            if event.get(name):
                self.summarized = isinstance(event[name], Mapping)
                values = list_values(event[name])
                self.workers[name] = len(values)
                for rank, value in enumerate(values):
                    self._append(f"{name} {rank}", nan if value is None else value)
        for column in self._columns.values():
            if len(column) < len(self.steps):
                column.append(nan)

    def _append(self, name: str, value: float | str) -> None:
        if name not in self._columns:
            self._columns[name] = array("d", [nan]) * (len(self.steps) - 1)
        number = float(value)  # non-finite numbers are strings in a journal
        self._columns[name].append(number if isfinite(number) or value is nan else inf)

    def forget_after(self, step: int) -> None:
        """Drop the lines of later steps."""
        for column in (*self._columns.values(), self.steps):
            del column[bisect_right(self.steps, step) :]

    def find_samples(self, step: int) -> tuple[int, int]:
        """The newest line up to a step that counts samples: its step and samples; zeros without one."""
        at = bisect_right(self.steps, step) - 1
        return (int(self.steps[at]), int(self._columns["samples"][at])) if at >= 0 else (0, 0)

    def series(self, name: str, *, by: str = "step", factor: float = 1.0, most: int = _MOST_POINTS) -> Series:
        """A column over steps or samples; where a number was not finite it is infinite."""
        places, values = self._read(by), self._read(name)
        known = ~np.isnan(values)
        return thin_series(places[known], factor * values[known], most)

    def _read(self, name: str) -> npt.NDArray[np.float64]:
        column = self.steps if name == "step" else self._columns.get(name)
        own = np.full(len(self.steps), nan) if column is None else np.array(column)
        if self.before is None or not self.steps:
            return own
        return np.concatenate([self.before._read(name)[: bisect_left(self.before.steps, self.steps[0])], own])


def thin_series(places: npt.NDArray[np.float64], values: npt.NDArray[np.float64], most: int = _MOST_POINTS) -> Series:
    """About `most` points of a curve at most: both ends, and the least and the greatest value of each short stretch."""
    if len(values) > most:
        stretch = -(-2 * len(values) // most)
        rows = np.append(values, np.full(-len(values) % stretch, nan)).reshape(-1, stretch)
        finite, begins = np.isfinite(rows), np.arange(len(rows)) * stretch
        least, greatest = np.where(finite, rows, inf).argmin(1), np.where(finite, rows, -inf).argmax(1)
        kept = np.unique(np.concatenate([begins + least, begins + greatest, [0, len(values) - 1]]))
        kept = kept[kept < len(values)]
        places, values = places[kept], values[kept]
    return places.tolist(), values.tolist()


def smooth_values(values: Sequence[float]) -> list[float]:
    """The exponential average over about a fortieth of a noisy curve, unbiased at its start."""
    keep = 1 - 1 / max(1.0, len(values) / 40)
    average, weight, averages = 0.0, 0.0, []
    for value in values:
        if isfinite(value):
            average, weight = keep * average + (1 - keep) * value, keep * weight + (1 - keep)
        averages.append(average / weight if weight else value)
    return averages


@dataclass
class CurveHistory(History):
    """A history with curves; of its `train` lines only the newest `keep` stay complete, unless that is 0."""

    keep: int = 0
    curves: Curves = field(default_factory=Curves)

    def add(self, event: Event) -> None:
        super().add(event)
        if event["event"] == "train" and self.attempts:
            self.curves.add(self.train[event["step"]])
            if self.keep and len(self.train) > 2 * self.keep:
                self.train = dict(sorted(self.train.items())[-self.keep :])

    def _forget_after(self, step: int) -> None:
        super()._forget_after(step)
        self.curves.forget_after(step)


@dataclass(frozen=True)
class RunData:
    """One run, with a name of its own; what it lacks of its files is {}."""

    name: str
    folder: Path
    history: CurveHistory
    summary: dict[str, Any]
    settings: dict[str, Any]
    forecast: dict[str, Any]

    @property
    def status(self) -> str:
        """How the last attempt ended; 'not over' while it runs, or if it was killed."""
        end = self.history.attempts[-1].end if self.history.attempts else None
        return str(end.get("status")) if end else "not over"

    def per_worker(self, name: str, *, most: int = _MOST_POINTS, **how: Any) -> list[Series]:
        """A series for each worker of the last line, of a number that `train` lines have for every worker.

        Of more than 64 workers those of the least, the mean and the greatest value; more than 8 share the points of 8.
        """
        curves = self.history.curves
        count = curves.workers.get(name, 0)
        most = max(50, most * 8 // max(8, count))
        return [curves.series(f"{name} {rank}", most=most, **how) for rank in range(count)]

    def evaluated(self, name: str, *, by: str = "step", factor: float = 1.0) -> Series:
        """A metric of the evaluations of the validation split."""
        evals = sorted(self.history.evals.items())
        events = [event for (_, of), event in evals if of == "val" and event.get(name) is not None]
        place = self.samples_at if by == "samples" else float
        places = np.array([place(event["step"]) for event in events])
        return thin_series(places, factor * np.array([float(event[name]) for event in events]))

    def samples_at(self, step: int) -> float:
        """Samples trained up to a step: those of the last line before it, and the planned ones since then."""
        known, samples = self.history.curves.find_samples(step)
        return float(samples + self._planned(step) - self._planned(known))

    def _planned(self, step: int) -> int:
        plan = self.history.plan
        size, per_epoch = plan.get("global_batch_size", 1), plan.get("steps_per_epoch", 1)
        epochs, rest = divmod(step, per_epoch)
        in_epoch = min(plan.get("samples", 0), per_epoch * size)  # without the samples that --drop-last leaves out
        return int(epochs * in_epoch + min(rest * size, in_epoch))


def load_runs(folders: Sequence[Path]) -> list[RunData]:
    """The runs in these folders, each of which must have a journal."""
    histories = [CurveHistory().follow(read_events(folder / JOURNAL)) for folder in folders]
    return [load_run(*each) for each in zip(_shorten_names(folders), folders, histories, strict=True)]


def load_run(name: str, folder: Path, history: CurveHistory) -> RunData:
    """A run whose journal was read, with its other files."""
    config = load_config(folder)
    settings = flatten_settings(config) if config else {}
    return RunData(name, folder, history, load_summary(folder), settings, read_json(folder / PLAN, PLAN))


def _shorten_names(folders: Sequence[Path]) -> list[str]:
    """Folder names, with as many parents' names as it takes to make them different."""
    paths = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-length:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


class Line(NamedTuple):
    """One curve; `kind` is 'noisy' (smoothed if it is long), 'plain', or 'dots' at evaluations."""

    label: str  # "" leaves it out of the legend
    color: int
    series: Series
    kind: str = "plain"
    dash: int = 0  # continuous, dashed or dotted


class Plot(NamedTuple):
    """Curves of one number; `scale` is 'free', 'zero' (begins there), or 'wide' (logarithmic over a wide range)."""

    name: str
    title: str
    scale: str
    lines: list[Line]


class Mark(NamedTuple):
    """What happened to a run, at its place on the axis: a 'restart', a 'resize' (other workers) or a 'fault'."""

    at: float
    kind: str
    text: str


def list_marks(run: RunData, by: str) -> Iterator[Mark]:
    """The restarts and faults of a run."""
    place = run.samples_at if by == "samples" else float
    for before, after in pairwise(run.history.attempts):
        old, new = (attempt.start.get("plan", {}).get("workers") for attempt in (before, after))
        text = "restarted" if old == new else f"{old} → {new} workers"
        text = f"{run.name}: {text} after step {after.resumed_at:,}"
        yield Mark(place(after.resumed_at), "restart" if old == new else "resize", text)
    for fault in (each for each in run.history.faults if each.get("kind") != "restart"):  # which is marked already
        text = f"{run.name}: {fault.get('kind')}: {fault.get('action')}"
        yield Mark(place(fault.get("step") or 0), "fault", text)


def list_plots(runs: Sequence[RunData], most: int = _MOST_POINTS) -> tuple[str, list[Plot]]:
    """What the curves are drawn over ('step' or 'samples'), and all plots that these runs have data for."""
    # steps of different global batches can't be compared; samples can
    by = "step" if len({run.history.plan.get("global_batch_size") for run in runs}) == 1 else "samples"
    curves, workers = partial(_list_curves, runs, by, most), partial(_list_workers, runs, by, most)
    plots = [
        Plot("loss", "Loss" + " (dashed: validation)" * (len(runs) > 1), "wide", [*_list_losses(runs, by, most)]),
        *_list_metrics(runs, by),
        Plot("learning_rate", "Learning rate", "zero", curves("lr", "plain")),
        Plot("throughput", "Training samples per second", "zero", curves("samples_per_second")),
        Plot("tokens", "Learned tokens per second", "zero", curves("tokens_per_second")),
        Plot("all_tokens", "All tokens per second", "zero", curves("all_tokens_per_second")),
        Plot("padding", "Padding, as a share of all places", "zero", curves("padding_share")),
        Plot("step_time", "Milliseconds per optimizer step", "zero", curves("step_ms")),
        Plot("waiting", "Share of time spent waiting (%)", "zero", [*_list_waits(runs, by, most)]),
        Plot("memory", "Peak memory per worker (GiB)", "zero", workers("memory", 2.0**-30)),
        Plot("own_time", "Own milliseconds per step", "zero", workers("own_ms")),
        Plot("cpu_utilisation", "CPU threads at work (%)", "zero", workers("cpu_utilisation")),
        Plot("gpu_utilisation", "GPU utilisation (%)", "zero", workers("gpu_utilisation")),
        Plot("gpu_power", "GPU power (W)", "zero", workers("gpu_power")),
        Plot("gpu_temperature", "GPU temperature (°C)", "zero", workers("gpu_temperature")),
        Plot("noise_scale", "Gradient noise scale (samples)", "zero", curves("noise_scale")),
        Plot("gradient_norm", "Gradient norm", "wide", curves("grad_norm")),
    ]
    drawn = ((plot, [line for line in plot.lines if any(map(isfinite, line.series[1]))]) for plot in plots)
    return by, [plot._replace(lines=lines) for plot, lines in drawn if lines]


def _list_losses(runs: Sequence[RunData], by: str, most: int) -> Iterator[Line]:
    alone = len(runs) == 1
    for number, run in enumerate(runs):
        trained = run.history.curves.series("mean_loss", by=by, most=most)
        yield Line("training" if alone else run.name, number, trained, "noisy")
        yield Line("validation" * alone, number + alone, run.evaluated("loss", by=by), "dots", 1)


def _list_metrics(runs: Sequence[RunData], by: str) -> Iterator[Plot]:
    """The task's metrics beside the loss, on the validation split."""
    known = {"event", "time", "epoch", "step", "split", "samples", "loss"}
    evals = [event for run in runs for event in run.history.evals.values() if event["split"] == "val"]
    for name in dict.fromkeys(key for event in evals for key in event if key not in known):
        unit, factor = (" (%)", 100.0) if "accuracy" in name else ("", 1.0)
        lines = [Line(run.name, at, run.evaluated(name, by=by, factor=factor), "dots") for at, run in enumerate(runs)]
        yield Plot(f"val_{name}", f"Validation {format_label(name)}{unit}", "free", lines)


def _list_curves(runs: Sequence[RunData], by: str, most: int, name: str, kind: str = "noisy") -> list[Line]:
    found = enumerate(run.history.curves.series(name, by=by, most=most) for run in runs)
    return [Line(runs[at].name, at, series, kind) for at, series in found]


def _list_waits(runs: Sequence[RunData], by: str, most: int) -> Iterator[Line]:
    for number, run in enumerate(runs):
        for at, (name, reason) in enumerate(_WAITS):
            series = run.history.curves.series(name, by=by, factor=100.0, most=most)
            alone = len(runs) == 1
            yield Line(reason if alone else f"{run.name}, {reason}", at if alone else number, series, "plain", at)


def _list_workers(runs: Sequence[RunData], by: str, most: int, name: str, factor: float = 1.0) -> list[Line]:
    alone, lines = len(runs) == 1, []
    for number, run in enumerate(runs):
        every = run.per_worker(name, by=by, factor=factor, most=most)
        for rank, series in enumerate(every):
            label = run.name * (rank == 0 and not alone)
            if alone and len(every) <= 8:
                label = ("least", "mean", "greatest")[rank] if run.history.curves.summarized else f"rank {rank}"
            lines.append(Line(label, rank if alone else number, series))
    return lines
