"""Orders runs by a number of their summaries, the best first; whether more or less is better follows from its name."""

from collections.abc import Iterator, Mapping, Sequence
from math import isnan
from pathlib import Path
from typing import Any

from multigpu_cli.errors import RequestError, did_you_mean
from multigpu_cli.monitor.history import History, load_history, load_summary

Figures = Mapping[str, float]

_LESS_IS_BETTER = {"loss", "seconds", "ms", "bytes", "mae", "rmse", "mse", "error", "perplexity", "drawdown"}
_REPEATED = {"loss", "accuracy"}  # in `best`: the same as its val_loss and val_accuracy
_USUAL = ("val_accuracy", "val_reward", "val_loss", "train_loss")


def read_figures(run: Path) -> Figures:
    """The numbers by which a run can be compared: of its summary, or of its journal while it has none.

    Raises:
        FileNotFoundError: it has neither.
    """
    summary = load_summary(run)
    return collect_figures(summary, History() if summary else load_history(run))


def collect_figures(summary: Mapping[str, Any], history: History) -> Figures:
    """The numbers of a summary: its own, `final`'s under their names, `best`'s as best_NAME; or else the journal's."""
    if not summary:
        return dict(_list_numbers(_read_journal(history)))
    best = {f"best_{name}": value for name, value in (summary.get("best") or {}).items() if name not in _REPEATED}
    times = {f"step_ms_{name}": value for name, value in (summary.get("step_ms") or {}).items()}
    peak = {"peak_memory_bytes": max(summary.get("peak_memory_bytes") or [0]) or None}
    return dict(_list_numbers({**summary, **(summary.get("final") or {}), **best, **times, **peak}))


def order_runs(figures: Sequence[Figures], key: str) -> list[int]:
    """The numbers of the runs, the best first; those without this figure, or with NaN, come last.

    Raises:
        RequestError: no run has a figure of this name.
    """
    known = {name for each in figures for name in each}
    if key not in known:
        remedy = did_you_mean(key, known) if known else "runs that have an evaluation or a summary"
        raise RequestError(f"--sort-by {key}: no run has such a number", remedy=remedy)
    sign = 1 if is_less_better(key) else -1

    def place(number: int) -> tuple[bool, float]:
        value = figures[number].get(key)
        return (True, 0.0) if value is None or isnan(value) else (False, sign * value)

    return sorted(range(len(figures)), key=place)


def choose_key(figures: Sequence[Figures]) -> str | None:
    """What runs are usually compared by: of the usual figures the one that most of them have; None without any."""
    counts = {key: sum(key in each for each in figures) for key in _USUAL}
    best = max(_USUAL, key=lambda key: counts[key])
    return best if counts[best] else None


def is_less_better(key: str) -> bool:
    """Whether a smaller number of this name is the better one."""
    return not key.endswith("per_second") and not _LESS_IS_BETTER.isdisjoint(key.split("_"))


def explain_order(key: str) -> str:
    """The order in words: 'by val_loss, lowest first'."""
    return f"by {key}, {'lowest' if is_less_better(key) else 'highest'} first"


def _read_journal(history: History) -> dict[str, Any]:
    """What a run at work has so far, under the names of a summary."""
    known = {"event", "time", "epoch", "step", "split", "samples"}
    found = {
        f"{split}_{name}": value
        for (_, split), event in sorted(history.evals.items())
        for name, value in event.items()
        if name not in known
    }
    last = history.last_train or {}
    return found | {"train_loss": last.get("mean_loss"), "samples_per_second": last.get("samples_per_second")}


def _list_numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """What is a number; those that are not finite are strings in JSON."""
    for name, value in values.items():
        of_numbers = isinstance(value, int | float) and not isinstance(value, bool)
        if of_numbers or value in ("NaN", "Infinity", "-Infinity"):
            yield name, float(value)
