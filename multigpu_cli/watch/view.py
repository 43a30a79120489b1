"""What the page shows, as plain data for JSON: the list of runs, one to five runs, a study, a checkpoint's check."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import combinations
from math import isfinite
from typing import Any

from multigpu_cli.checkpoint import manifest
from multigpu_cli.commands.report import data
from multigpu_cli.commands.status import read_status
from multigpu_cli.commands.verify import compare_runs
from multigpu_cli.errors import RequestError
from multigpu_cli.monitor.curves import Line, Plot, RunData, Series, list_marks, list_plots
from multigpu_cli.monitor.format import format_metric
from multigpu_cli.monitor.pace import divide_step, forecast_checkpoint, forecast_step
from multigpu_cli.monitor.plot_style import color_of_run
from multigpu_cli.tune.scheduler import list_front, rank_trials
from multigpu_cli.tune.trials import read_study
from multigpu_cli.watch.runs import RunFollower, WatchedRuns, id_of

MOST_RUNS = 5  # in one view
_POINTS = 800  # of a curve
_COLORS = [color_of_run(number) for number in range(8)]
_AT_WORK = ("starting", "running")
_PROBLEMS = (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, RequestError, TypeError, ValueError)


def answer_or_explain(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the call returns, or {"error": why it does not}: files may hold anything."""
    try:
        return call()
    except _PROBLEMS as error:
        return {"error": getattr(error, "problem", f"{type(error).__name__}: {error}")}


def list_runs(runs: WatchedRuns, patience: float) -> dict[str, Any]:
    """A row for each run, those at work first, and the studies; where the seconds do not suffice, more by each call."""
    until = time.monotonic() + patience
    longest_ago_first = sorted(runs.runs.values(), key=lambda each: each.looked)
    rows = []
    for each in longest_ago_first:
        row = {"id": id_of(each.folder), "name": each.name, "phase": "unread", "detail": "read in a moment"}
        row |= answer_or_explain(partial(_make_row, each, until))
        rows.append(row | {"phase": "unreadable", "detail": row["error"]} if "error" in row else row)
    rows.sort(key=lambda row: (row.get("state") not in _AT_WORK, row.get("silent_seconds", 0.0)))
    studies = [{"id": key, "name": runs.name(folder)} for key, folder in runs.studies.items()]
    return {"runs": rows, "studies": studies, "paths": list(map(str, runs.roots))}


def _make_row(follower: RunFollower, until: float) -> dict[str, Any]:
    if (left := until - time.monotonic()) > 0:
        follower.advance(left)
    return describe_run(follower.read(), time.time()) if follower.share is not None else {}


def describe_run(run: RunData, now: float) -> dict[str, Any]:
    """The state of a run and its numbers, at Unix time `now`."""
    history, status = run.history, read_status(run.folder, now, run.history)
    busy, total = status.state in _AT_WORK, status.total_steps
    return vars(status) | {
        "id": id_of(run.folder),
        "name": run.name,
        "val": [[name, format_metric(name, value, decimals=4)] for name, value in status.val.items()],
        "end": forecast_step(history, total, now) if busy and total else None,
        "next": forecast_checkpoint(history, run.settings.get("checkpoint_every"), now) if busy else None,
        "spark": _round(history.curves.series("mean_loss", most=80)),
        "shares": divide_step(history),
    }


def show_runs(runs: WatchedRuns, names: Sequence[str], known: str, patience: float) -> dict[str, Any]:
    """One to five runs: their states, and unless the caller has that version already, their plots and tables."""
    if not 0 < len(names) <= MOST_RUNS:
        raise RequestError(f"{len(names)} runs: the page shows 1 to {MOST_RUNS}")
    followers = runs.find(names)
    for each in followers:
        each.advance(patience / len(names))
    found, now = [each.read() for each in followers], time.time()
    shown = {
        "version": " ".join(each.version for each in followers),
        "share": min(each.share or 0.0 for each in followers),
        "colors": _COLORS,
        "runs": [describe_run(run, now) for run in found],
    }
    if shown["version"] == known:
        return shown
    by, plots = list_plots(found, _POINTS)
    pairs = ((a, b, a.summary.get("fingerprint")) for a, b in combinations(found, 2))
    equal = [each for each in pairs if each[2] and each[2] == each[1].summary.get("fingerprint")]
    return shown | {
        "by": by,
        "plots": [_plain(plot) for plot in plots],
        "marks": [mark._asdict() for run in found for mark in list_marks(run, by)],
        "tables": [table._asdict() for table in _list_tables(found)],
        "checkpoints": [[*_list_checkpoints(run)] for run in found],
        "verified": [text for a, b, same in equal if (text := _verify(str(a.folder), str(b.folder), same))],
    }


def _plain(plot: Plot) -> dict[str, Any]:
    return plot._asdict() | {"lines": [line._asdict() | {"series": _round(line.series)} for line in plot.lines]}


def _round(series: Series) -> Series:
    """Six digits suffice on a screen; what is not finite is a gap."""
    return series[0], [float(f"{value:.6g}") if isfinite(value) else None for value in series[1]]  # type: ignore[misc]


def _list_tables(runs: Sequence[RunData]) -> Iterator[data.ReportTable]:
    """The tables of the report; of several runs the settings that differ come first."""
    settings, several = data.tabulate_settings(runs)[0], len(runs) > 1
    if several:
        rows = [(name, cells) for name, cells in settings.rows if len(set(cells[:-1])) > 1]
        yield data.ReportTable("Settings that differ", settings.columns, rows)
    yield data.tabulate_outcome(runs)
    for run in runs:
        yield data.tabulate_events(run)._replace(title=f"Faults and restarts{f': {run.name}' * several}")
    if not several:
        yield data.tabulate_plan(runs[0])._replace(title="Plan against reality")
        named = (("Samples", data.tabulate_samples(runs[0])), ("Classes", data.tabulate_classes(runs[0])))
        yield from (table._replace(title=title) for title, table in named if table.rows)
    yield settings
    yield data.tabulate_environment(runs)


def _list_checkpoints(run: RunData) -> Iterator[dict[str, Any]]:
    """Each checkpoint, the newest first, and whether its manifest is intact; the other files are not read."""
    for folder in manifest.list_checkpoint_folders(run.folder / "checkpoints"):
        damage = manifest.find_manifest_damage(folder)
        size = 0 if damage else sum(file["size"] for file in manifest.read_manifest(folder)["files"].values())
        yield {"name": folder.name, "damage": damage, "bytes": size}


def check_checkpoint(runs: WatchedRuns, ids: Sequence[str], checkpoint: str) -> dict[str, Any]:
    """Read all files of a checkpoint and compare them with its manifest."""
    for follower in runs.find(ids[:1]):
        for folder in manifest.list_checkpoint_folders(follower.folder / "checkpoints"):
            if folder.name == checkpoint:
                return {"damage": manifest.find_damage(folder)}
    raise RequestError(f"{checkpoint}: no such checkpoint")


@cache
def _verify(one: str, other: str, fingerprint: str) -> str | None:
    """That two runs with the same fingerprint are the same, if `verify` agrees; their folders are read once."""
    try:
        compared = compare_runs(one, other)
    except RequestError:  # of different settings: equal weights say nothing
        return None
    logged = "but not what was logged" if compared.parting else f"and all that both logged ({compared.lines:,})"
    return f"{one} and {other}: verified equal, the weights {logged}" if compared.same else None


def show_study(runs: WatchedRuns, key: str) -> dict[str, Any]:
    """A study: its trials, the best first, and their objectives after each rung; those that no other beats in blue."""
    if key not in runs.studies:
        raise RequestError(f"{key}: no such study")
    study, trials = read_study(path := runs.studies[key])
    ranked, front = rank_trials(study, trials), {trial.number for trial in list_front(study, trials)}
    rows, links, plots = [], {}, [Plot(goal, goal, "free", []) for goal in study.objectives]
    for trial in [*ranked, *(trial for trial in trials if trial not in ranked)]:
        best, name = trial.number in front, f"trial {trial.number}"
        links[name] = id_of(study.run_folder(path, trial.number, 0))
        newest = [f"{value:.6g}" for value in trial.values[max(trial.values)]] if trial.values else [""] * len(plots)
        settings = [str(trial.params.get(each, "")) for each in study.search]
        cells = ["best" * best, trial.error or trial.state, str(max(trial.values, default=0)), *newest, *settings]
        rows.append((name, cells))
        for at, plot in enumerate(plots):
            series = [float(each) for each in trial.values], [each[at] for each in trial.values.values()]
            plot.lines.extend([Line(name * best, 0 if best else 7, series, "dots")] * bool(trial.values))
    columns = ["", "state", "epochs", *study.objectives, *study.search]
    about = {"name": runs.name(path), "runs": [], "links": links, "by": "epoch", "marks": [], "colors": _COLORS}
    shown = [_plain(plot._replace(lines=plot.lines[::-1])) for plot in plots]  # the best lies on top
    return about | {"plots": shown, "tables": [data.ReportTable("Trials", columns, rows)._asdict()]}
