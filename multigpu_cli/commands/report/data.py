"""The tables of a report; the cell of an unknown value is empty."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby, pairwise
from math import isfinite
from statistics import median
from typing import Any, NamedTuple

from multigpu_cli.config.resume_rules import flatten_settings
from multigpu_cli.config.schema import Config
from multigpu_cli.errors import pluralize
from multigpu_cli.monitor.curves import RunData
from multigpu_cli.monitor.format import format_duration, format_label, format_metric, format_number, list_values
from multigpu_cli.planning.memory import Memory

Row = tuple[str, list[str]]


class ReportTable(NamedTuple):
    """A heading, the names of its columns, and rows of a label and cells."""

    title: str
    columns: list[str]
    rows: list[Row]


def tabulate_overview(runs: Sequence[RunData], order: str) -> ReportTable:
    """A row for each run, in their order: how it ended, its metrics, and the settings in which the runs differ."""
    metrics = dict.fromkeys(name for run in runs for name, value in _metrics(run).items() if value is not None)
    settings = [name for name in flatten_settings(Config()) if len({str(run.settings.get(name)) for run in runs}) > 1]
    columns = ["status", *map(format_label, metrics), "training time", "samples per second", *settings]
    rows: list[Row] = []
    for run in runs:
        cells = [run.status, *(_show(_metrics(run).get(name), partial(format_metric, name)) for name in metrics)]
        cells.append(_show(run.summary.get("train_seconds"), format_duration))
        cells.append(_show(run.summary.get("samples_per_second"), "{:,.0f}".format))
        rows.append((run.name, [*cells, *(_format_cell(run.settings.get(name)) for name in settings)]))
    return ReportTable(f"All runs{', ' * bool(order)}{order}", columns, rows)


def _metrics(run: RunData) -> dict[str, Any]:
    return run.summary.get("final") or {}


def tabulate_outcome(runs: Sequence[RunData]) -> ReportTable:
    """How the runs ended."""
    final = [_metrics(run) for run in runs]
    names = dict.fromkeys(name for each in final for name, value in each.items() if value is not None)
    step_times = [run.summary.get("step_ms") or {} for run in runs]
    peaks = [dict.fromkeys(run.summary.get("peak_memory_bytes") or []) for run in runs]
    ordered = sorted(names, key=lambda name: (not name.startswith("test"), "accuracy" not in name))
    rows: list[Row] = [("status", [run.status for run in runs])]
    rows += [
        (format_label(name), [_show(each.get(name), partial(format_metric, name)) for each in final])
        for name in ordered
    ]
    rows += [
        ("best epoch", [_format_cell((run.summary.get("best") or {}).get("epoch")) for run in runs]),
        ("optimizer steps", [f"{run.history.steps_taken:,}" for run in runs]),
        ("training time", [_show(run.summary.get("train_seconds"), format_duration) for run in runs]),
        ("start-up", [_show(run.summary.get("startup_seconds"), format_duration) for run in runs]),
        ("samples per second", [_show(run.summary.get("samples_per_second"), "{:,.0f}".format) for run in runs]),
        ("step, median", [_show(times.get("p50"), "{:.1f} ms".format) for times in step_times]),
        ("step, 95 % within", [_show(times.get("p95"), "{:.1f} ms".format) for times in step_times]),
        ("peak memory per worker", [", ".join(f"{peak / 2**30:.2f} GiB" for peak in each) for each in peaks]),
        ("attempts", [str(len(run.history.attempts)) for run in runs]),
        ("faults", [str(len(run.history.faults)) for run in runs]),
        ("fingerprint", [run.summary.get("fingerprint") or "" for run in runs]),
    ]
    return ReportTable("Result", [run.name for run in runs], [row for row in rows if any(row[1])])


def pick_headline(run: RunData) -> list[tuple[str, str]]:
    """The most important numbers, for the head of the page."""
    rows = {name: cells[0] for name, cells in tabulate_outcome([run]).rows}
    measures = ["test accuracy", "val accuracy", "test loss", "val loss"]
    wanted = ["status", *measures, "optimizer steps", "training time", "samples per second"]
    return [(name, rows[name]) for name in wanted if name in rows][:6]


def tabulate_plan(run: RunData) -> ReportTable:
    """The plan of the first start, beside what happened."""
    history = run.history
    plans = [attempt.start.get("plan", {}) for attempt in history.attempts]
    plan, now = plans[0] if plans else {}, history.plan
    workers = [str(count) for count, _ in groupby(plan.get("workers") for plan in plans) if count is not None]
    rates = [rate for rate in history.curves.series("lr")[1] if isfinite(rate)]
    planned_epochs = plan.get("total_steps", 0) / (plan.get("steps_per_epoch") or 1)
    repeated = sum(max(0, before.reached - after.resumed_at) for before, after in pairwise(history.attempts))
    rows = [
        ("workers", plan.get("workers"), " → ".join(workers)),
        ("samples per micro-batch", plan.get("batch_size"), now.get("batch_size")),
        ("global batch", plan.get("global_batch_size"), now.get("global_batch_size")),
        ("optimizer steps", plan.get("total_steps"), history.steps_taken),
        ("epochs", format_number(planned_epochs), format_number(history.step / (now.get("steps_per_epoch") or 1))),
        ("greatest learning rate, of the steps logged", plan.get("learning_rate"), max(rates, default=None)),
        ("precision", plan.get("precision"), run.summary.get("precision")),
        ("steps done twice after a restart", 0, repeated),
    ]
    cells = [(name, [_format_cell(planned), _format_cell(actual)]) for name, planned, actual in rows]
    return ReportTable(run.name, ["planned", "came"], cells + list(_compare_forecast(run)))


def _compare_forecast(run: RunData) -> Iterator[Row]:
    """The forecast of `plan --save-dir`, for the number of workers and the global batch of the last attempt."""
    now, last = run.history.plan, run.history.last_train or {}
    wanted = {"workers": now.get("workers"), "global_batch": now.get("global_batch_size")}
    every = run.forecast.get("rows", [])
    row: dict[str, Any] = next((row for row in every if wanted.items() <= row.items()), {})
    if every and not row:
        yield "forecast", [f"of other numbers: {', '.join(str(each['workers']) for each in every)} workers", ""]
    waits = [event["comm_share"] * event["step_ms"] for event in run.history.train.values() if event.get("comm_share")]
    exposed = median(waits) if waits else None
    needs = None
    if row:  # of each worker, which holds less if the model is sharded
        sharded = (each for each in run.forecast.get("sharded", []) if each["workers"] == row["workers"])
        needs = Memory(**next(sharded, run.forecast)["memory"]).total_bytes(run.forecast["micro_batch"])
    held = max(list_values(last["memory"])) / 2**20 if last.get("memory") else None
    rate = run.summary.get("samples_per_second") or last.get("samples_per_second")
    memory = "peak memory per worker" if now.get("device") != "cpu" else "memory per worker (tensors; the process)"
    rows_of = {
        "step, median": ("ms", 1e3 * row["step"] if row else None, last.get("step_p50_ms")),
        "exposed communication of a step": ("ms", 1e3 * row["waiting"] if row else None, exposed),
        "samples per second": ("", row.get("samples_per_second"), rate),
        "seconds of training": ("s", row.get("seconds"), run.summary.get("train_seconds")),
        memory: ("MiB", needs and needs / 2**20, held),
    }
    for name, (unit, planned, actual) in rows_of.items():
        if planned is not None or actual is not None:
            off = f" ({actual / planned - 1:+.0%})" if planned and actual is not None else ""
            yield name, [_format_with_unit(planned, unit), _format_with_unit(actual, unit) + off]


def _format_with_unit(value: float | None, unit: str) -> str:
    return "" if value is None else f"{format_number(float(value))} {unit}".strip()


def tabulate_events(run: RunData) -> ReportTable:
    """Starts, restarts, faults and ends, in order of time."""
    if not run.history.attempts:
        return ReportTable(run.name, [], [])
    zero = run.history.attempts[0].start["time"]
    events: list[tuple[float, str]] = []
    for count, attempt in enumerate(run.history.attempts, 1):
        plan, at = attempt.start.get("plan", {}), attempt.resumed_at
        going_on = f", resumes from step {at}" if at else ""
        workers = f", {pluralize(plan['workers'], 'worker')}" if "workers" in plan else ""
        text = f"attempt {count} starts: {plan.get('strategy', 'unknown')}{workers}{going_on}"
        events.append((attempt.start["time"], text))
        if end := attempt.end:
            cause = f": {end['cause']}" if end.get("cause") else ""
            events.append((end["time"], f"{end.get('status')} at step {end.get('step')}{cause}"))
        else:
            events.append((attempt.last, "the last line of this attempt: it is running, or was killed"))
    events += [(e["time"], f"{e.get('kind')} at step {e.get('step')}: {e.get('action')}") for e in run.history.faults]
    for back in run.history.recoveries:
        after, again = format_duration(back["seconds"]), pluralize(back["lost_steps"], "step")
        cost = f"{after} after the previous attempt had stopped, {again}"
        events.append((back["time"], f"at work again, {cost} done again ({back['cause']})"))
    rows = [(f"+ {format_duration(when - zero)}", [what]) for when, what in sorted(events)]
    first = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(zero))
    return ReportTable(run.name, [f"first start {first}"], rows)


def tabulate_samples(run: RunData) -> ReportTable:
    """The model's answers to each prompt, epoch by epoch; one that did not come to its end ends in an ellipsis."""
    events = [event for _, event in sorted(run.history.samples.items())]
    asked = dict.fromkeys(sample["prompt"] for event in events for sample in event["samples"])
    rows: list[Row] = []
    for event in events:
        said = {each["prompt"]: each["answer"] if each["ended"] else f"{each['answer']} …" for each in event["samples"]}
        rows.append((f"epoch {event['epoch']}", [said.get(prompt, "") for prompt in asked]))
    return ReportTable(run.name, list(asked), rows)


def tabulate_classes(run: RunData) -> ReportTable:
    """Precision, recall and F1 of each class, from the summary."""
    rows = run.summary.get("per_class") or []
    columns = [name for name in rows[0] if name != "class"] if rows else []
    values = [[row.get(name) for name in columns] for row in rows]
    texts = [[f"{each:.3f}" if isinstance(each, float) else _format_cell(each) for each in row] for row in values]
    cells = [(str(row.get("class", at)), text) for at, (row, text) in enumerate(zip(rows, texts, strict=True))]
    return ReportTable(run.name, columns, cells)


def tabulate_settings(runs: Sequence[RunData]) -> tuple[ReportTable, str]:
    """The settings in which some run differs from the defaults, and all others in one text."""
    defaults = flatten_settings(Config())
    names = [name for name in defaults if any(name in run.settings for run in runs)]
    changed = [name for name in names if any(run.settings.get(name) != defaults[name] for run in runs)]
    columns = [*(run.settings for run in runs), defaults]
    rows = [(name, [_format_cell(settings.get(name)) for settings in columns]) for name in changed]
    rest = ", ".join(f"{name} {_format_cell(defaults[name]) or '–'}" for name in names if name not in changed)
    return ReportTable("Configuration", [*(run.name for run in runs), "default"], rows), rest


def tabulate_environment(runs: Sequence[RunData]) -> ReportTable:
    """Where the last attempt of each run ran."""
    starts = [run.history.attempts[-1].start if run.history.attempts else {} for run in runs]
    versions = dict.fromkeys(name for start in starts for name in start.get("versions", {}))
    rows: list[Row] = [
        ("folder", [str(run.folder) for run in runs]),
        ("contents", [_format_cell(run.history.plan.get("contents")) for run in runs]),
        ("where", [_format_cell(run.history.plan.get("because")) for run in runs]),
        ("host", [_format_cell(start.get("host")) for start in starts]),
        ("device", [_format_cell(run.history.plan.get("device")) for run in runs]),
        ("CPU threads per worker", [_format_cell(run.history.plan.get("threads")) for run in runs]),
    ]
    rows += [(name, [_format_cell(start.get("versions", {}).get(name)) for start in starts]) for name in versions]
    return ReportTable("Environment", [run.name for run in runs], [row for row in rows if any(row[1])])


def _format_cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None or value in ({}, ()) else f"{value:,}" if type(value) is int else str(value)


def _show(value: Any, form: Callable[[Any], str]) -> str:
    return "" if value is None else form(value)
