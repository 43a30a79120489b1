"""The data of a report: a run's history, its end, its settings, and its numbers as series."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from multigpu_cli.config.resume_rules import flatten_settings
from multigpu_cli.config.sources import resolve
from multigpu_cli.monitor.history import PLAN, History, load_history, load_summary, read_json

Series = tuple[list[float], list[float]]
_MOST_POINTS = 1500


@dataclass(frozen=True)
class RunData:
    """One run, with a name of its own; what it lacks of its files is {}."""

    name: str
    folder: Path
    history: History
    summary: dict[str, Any]
    settings: dict[str, Any]
    forecast: dict[str, Any]

    @property
    def status(self) -> str:
        """How the last attempt ended; 'not over' while it runs, or if it was killed."""
        end = self.history.attempts[-1].end if self.history.attempts else None
        return str(end["status"]) if end else "not over"

    def curve(self, field: str, *, by: str = "step", factor: float = 1.0) -> Series:
        """A number of the `train` lines over `by`, thinned out where there are very many lines."""
        events = [event for _, event in sorted(self.history.train.items()) if event.get(field) is not None]
        return thin_series([float(event[by]) for event in events], [factor * float(event[field]) for event in events])

    def per_worker(self, field: str, *, by: str = "step", factor: float = 1.0) -> list[Series]:
        """One series for each worker of the last line, of a number that `train` lines have for every worker."""
        events = [event for _, event in sorted(self.history.train.items()) if event.get(field)]
        count = len(events[-1][field]) if events else 0
        series = []
        for rank in range(count):
            there = [event for event in events if len(event[field]) > rank and event[field][rank] is not None]
            values = [factor * float(event[field][rank]) for event in there]
            series.append(thin_series([float(event[by]) for event in there], values))
        return series

    def evaluated(self, field: str, split: str = "val", *, by: str = "step", factor: float = 1.0) -> Series:
        """A metric of the evaluations of a split."""
        events = [event for (_, of), event in sorted(self.history.evals.items()) if of == split and field in event]
        place = self._samples_at if by == "samples" else float
        return [place(event["step"]) for event in events], [factor * float(event[field]) for event in events]

    def _samples_at(self, step: int) -> float:
        """Samples trained up to a step: those of the last line before it, and the planned ones since then."""
        train = self.history.train
        known = step if step in train else max((at for at in train if at < step), default=0)
        samples = train[known]["samples"] if known else 0
        return float(samples + self._planned(step) - self._planned(known))

    def _planned(self, step: int) -> int:
        plan = self.history.plan
        size, per_epoch = plan["global_batch_size"], plan["steps_per_epoch"]
        epochs, rest = divmod(step, per_epoch)
        in_epoch = min(plan["samples"], per_epoch * size)  # without the samples that --drop-last leaves out
        return int(epochs * in_epoch + min(rest * size, in_epoch))


def load_runs(folders: Sequence[Path]) -> list[RunData]:
    """The runs in these folders."""
    names = _shorten_names(folders)
    return [
        RunData(
            name=name,
            folder=folder,
            history=load_history(folder),
            summary=load_summary(folder),
            settings=_read_settings(folder),
            forecast=read_json(folder / PLAN),
        )
        for name, folder in zip(names, folders, strict=True)
    ]


def thin_series(places: list[float], values: list[float]) -> Series:
    """About 1,500 points of a curve at most, with its last one."""
    every = -(-len(places) // _MOST_POINTS)
    if every <= 1:
        return places, values
    return places[:-1:every] + places[-1:], values[:-1:every] + values[-1:]


def smooth_values(values: Sequence[float]) -> list[float]:
    """The exponential average over about a fortieth of a noisy curve, unbiased at its start."""
    keep = 1 - 1 / max(1.0, len(values) / 40)
    average, weight, averages = 0.0, 0.0, []
    for value in values:
        if isfinite(value):
            average, weight = keep * average + (1 - keep) * value, keep * weight + (1 - keep)
        averages.append(average / weight if weight else value)
    return averages


def _shorten_names(folders: Sequence[Path]) -> list[str]:
    """Folder names, with as many parents' names as it takes to make them different."""
    paths = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-length:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _read_settings(folder: Path) -> dict[str, Any]:
    file = folder / "config.yaml"
    return flatten_settings(resolve({}, [], str(file))) if file.is_file() else {}
