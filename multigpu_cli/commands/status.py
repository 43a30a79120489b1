"""status: the state of runs, their progress and problems, from the journals alone; the best run first if asked."""

import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isnan
from pathlib import Path
from typing import Any

from multigpu_cli.checkpoint.files import is_locked, read_owner
from multigpu_cli.config.regular_files import read_small, refuse_links
from multigpu_cli.config.yaml_text import list_arguments
from multigpu_cli.errors import RequestError, did_you_mean, make_line, pluralize
from multigpu_cli.loggers.sender import explain_unsent, list_unsent
from multigpu_cli.mirror.follower import explain_missing, read_state
from multigpu_cli.monitor.format import format_duration, format_metric, format_number
from multigpu_cli.monitor.history import (
    JOURNAL,
    Attempt,
    History,
    JournalTail,
    find_run_folders,
    load_config,
    load_history,
    load_summary,
)
from multigpu_cli.monitor.journal import dump_json, read_json
from multigpu_cli.monitor.pace import forecast_step
from multigpu_cli.monitor.run_state import STATE, read_process

HOME = "checkpoints"
_PATIENCE = 60.0  # seconds without a line that are normal
_FIRST_PATIENCE = 600.0  # before the first line: loading, compiling
_REFRESH = 2.0  # seconds
_REPAINT = "\x1b[H\x1b[2J"
_SHOWN = ("loss", "perplexity", "accuracy", "reward")
_RUNNING = ("starting", "running")
_STATES = {"dead": "died", "restarting": "starting"} | dict.fromkeys(
    ("training", "evaluating", "saving", "ending"), "running"
)


@dataclass(frozen=True)
class Status:
    """One run, now."""

    run: str
    state: str  # starting, running, completed, stopped, failed, died (ended without writing so), or unknown
    phase: str  # the same, but of a running one: training, evaluating, saving or ending; it may be restarting
    detail: str  # how the state is known
    host: str | None
    strategy: str | None
    workers: int | None
    device: str | None
    step: int  # in the planned optimizer steps
    total_steps: int | None  # planned
    epoch: int | None
    loss: float | None  # the mean since the line before; of a completed run, its last epoch's
    val: dict[str, float]
    samples_per_second: float | None  # of the last window of the journal
    eta_seconds: float | None  # at the pace of the last lines, evaluations included; early stopping may end it sooner
    checkpoint_step: int | None  # the newest checkpoint's
    checkpoint_age: float | None  # seconds since it was written
    silent_seconds: float  # since the newest line or sign
    attempts: int
    recovery_seconds: float | None = None  # from the end of an attempt of this launch to the next one's first step
    lost_steps: int | None = None  # repeated after that
    alarms: list[str] = field(default_factory=list)
    sort_value: float | None = None  # value of the --sort-by metric; None if the run lacks it
    command: str | None = None  # the best run's, which gives its settings again; None without --sort-by


def find_runs(names: Sequence[str]) -> list[Path]:
    """The run folders at or below these paths; without names, those under checkpoints/."""
    runs: dict[Path, None] = {}
    for name in names or [HOME]:
        here = find_run_folders(Path(name))
        if not here:
            refuse_links(Path(name))  # a run whose journal is a link is none
            problem = f"{name} has no run: there is no journal.jsonl in it, nor two levels below"
            raise RequestError(problem, remedy="the --save-dir of a run, or a folder of runs")
        runs |= dict.fromkeys(here)
    return list(runs)


def read_status(run: Path, now: float, history: History | None = None) -> Status:
    """Return the state of a run at time `now` (Unix seconds), from its `history`; None: read it from the journal."""
    history = history or load_history(run)
    begun = (run / JOURNAL).stat().st_mtime  # of a journal that has no line yet
    attempt = history.attempts[-1] if history.attempts else Attempt({"time": begun}, begun)
    plan, last = history.plan, history.last_train or {}
    sign = _read_sign(run, attempt)
    silent = max(0.0, now - max(attempt.last, sign.get("time", 0.0)))
    phase, detail = _judge_state(run, history, attempt, sign, silent)
    state = _STATES.get(phase, phase)
    total, saved = plan.get("total_steps"), history.checkpoints[-1] if history.checkpoints else {}
    end = forecast_step(history, total, now) if total and state in _RUNNING else None
    back = history.recoveries[-1] if history.recoveries else {}
    result = load_summary(run).get("final") or {} if state == "completed" else {}
    evals = {split: event for (_, split), event in sorted(history.evals.items())}
    return Status(
        run=str(run),
        state=state,
        phase=phase,
        detail=detail,
        host=attempt.start.get("host"),
        strategy=plan.get("strategy"),
        workers=plan.get("workers"),
        device=plan.get("device"),
        step=history.step,
        total_steps=total,
        epoch=last.get("epoch"),
        loss=_parse_float(result.get("train_loss", last.get("mean_loss"))),
        val={name: value for name, value in evals.get("val", {}).items() if name in _SHOWN},
        samples_per_second=_parse_float(last.get("samples_per_second")),
        eta_seconds=end.seconds if end else None,
        checkpoint_step=saved.get("step"),
        checkpoint_age=max(0.0, now - saved["time"]) if saved else None,
        silent_seconds=silent,
        attempts=len(history.attempts),
        recovery_seconds=back.get("seconds"),
        lost_steps=back.get("lost_steps"),
        alarms=[*_list_alarms(history, attempt, state, detail, silent), *_list_companion_alarms(run, state)],
    )


def watch_runs(names: Sequence[str], *, as_json: bool, repeat: bool, sort_by: str | None = None) -> None:
    """Show the runs once, or again and again until none of them is at work; the best run by `sort_by` comes first."""
    followed: dict[Path, tuple[JournalTail, History]] = {}
    while True:
        statuses = [read_status(run, time.time(), _follow(run, followed)) for run in find_runs(names)]
        if sort_by is not None:
            statuses = sort_statuses(statuses, sort_by)
        if as_json:
            print(dump_json(statuses, indent=None if repeat else 2), flush=True)
        else:
            text = "\n".join(map(make_line, format_statuses(statuses, sort_by)))
            print((_REPAINT if repeat and sys.stdout.isatty() else "") + text, flush=True)
        if not repeat or not any(status.state in _RUNNING for status in statuses):
            return
        time.sleep(_REFRESH)


def _follow(run: Path, followed: dict[Path, tuple[JournalTail, History]]) -> History:
    """The history of a run, to which each call adds what is new in its journal."""
    file = run / JOURNAL
    if run not in followed or file.stat().st_size < followed[run][0].end:  # a different journal replaced it
        followed[run] = JournalTail(file), History()
    tail, history = followed[run]
    return history.follow(line.event for line in tail.read())


def sort_statuses(statuses: Sequence[Status], key: str) -> list[Status]:
    """The best run first, with its command line."""
    figures = [read_figures(Path(status.run)) for status in statuses]
    order = order_runs(figures, key)
    ordered = [replace(statuses[number], sort_value=figures[number].get(key)) for number in order]
    return [replace(ordered[0], command=_read_command(Path(ordered[0].run))), *ordered[1:]]


def _read_command(run: Path) -> str | None:
    config = load_config(run)
    if config is None:
        return None
    words = shlex.join(["python", "main_multi_gpu.py", *list_arguments(config)])
    has_objects = read_small(run / "config.yaml").startswith(b"# with live objects")
    return words + ("  # and what Python brought, see config.yaml" if has_objects else "")


def format_statuses(statuses: Sequence[Status], sorted_by: str | None = None) -> Iterator[str]:
    """Two lines for each run, and one for each alarm; where they are sorted, also the order and the best's command."""
    width = max(len(status.run) for status in statuses)
    if sorted_by is not None:
        yield f"{explain_order(sorted_by)}:"
    for status in statuses:
        total = f"/{status.total_steps:,}" if status.total_steps else ""
        parts = [f"{status.run:<{width}}  {status.state:<9}  step {status.step:,}{total}"]
        if sorted_by is not None:
            value = "unknown" if status.sort_value is None else f"{status.sort_value:.6g}"
            parts.insert(0, f"{sorted_by} {value:<9}")
        parts += [f"epoch {status.epoch}"] if status.epoch is not None else []
        label = "train loss" if status.state == "completed" else "loss"
        parts += [f"{label} {format_number(status.loss)}"] if status.loss is not None else []
        parts += [f"val {name} {format_metric(name, value)}" for name, value in status.val.items()]
        parts += [f"{status.samples_per_second:,.0f} samples/s"] if status.samples_per_second else []
        parts += [f"{format_duration(status.eta_seconds)} left"] if status.eta_seconds is not None else []
        yield "  ".join(parts)
        where = "no start recorded yet"
        if status.strategy:
            where = f"{status.strategy}, {pluralize(status.workers or 0, 'worker')}, {status.device}"
        where += f" on {status.host}" if status.host else ""
        saved = "no checkpoint yet"
        if status.checkpoint_age is not None:
            saved = f"checkpoint of step {status.checkpoint_step:,}, {format_duration(status.checkpoint_age)} ago"
        tries = f"; started {status.attempts} times" if status.attempts > 1 else ""
        if status.recovery_seconds is not None:
            again = pluralize(status.lost_steps or 0, "step")
            tries += f", training again after {format_duration(status.recovery_seconds)}, {again} done twice"
        yield f"  {where}; {saved}; last line {format_duration(status.silent_seconds)} ago{tries}"
        for alarm in status.alarms:  # the cause of a failure may have several lines, with remedies
            yield f"  ! {' | '.join(map(str.strip, alarm.splitlines()))}"
        yield from [f"  {status.command}"] if status.command else []


def _read_sign(run: Path, attempt: Attempt) -> dict[str, Any]:
    """Return logs/state.json; {} if it is missing, or was written by an older attempt."""
    sign = read_json(run / STATE, STATE)
    return sign if sign and sign["time"] > attempt.start["time"] - _PATIENCE else {}


def _judge_state(
    run: Path, history: History, attempt: Attempt, sign: Mapping[str, Any], silent: float
) -> tuple[str, str]:
    """The phase of a run and how it is known; `sign` is its logs/state.json. The lock is held while rank 0 lives."""
    try:
        locked, owner = is_locked(run), read_owner(run)
    except RequestError as error:
        return "unknown", f"whether a process is at work can't be seen: {error.problem}"
    end, (host, _, pid) = attempt.end, owner.partition(" ")
    if end and locked and sign.get("phase") == "starting" and sign["time"] > end["time"]:
        end = None  # of the attempt before
    process, since = f"process {pid} on {host}", f"the last sign was {format_duration(silent)} ago"
    here, its_own = host == os.uname().nodename, owner == f"{sign.get('host')} {sign.get('pid')}"
    lost = here and its_own and (end.get("status") == "failed" if end else not locked)
    if lost and read_process(sign.get("launcher", 0))[1] == sign.get("launcher_started", 0):
        return "restarting", f"{process} has ended, and its launcher starts it again"
    if end:
        return str(end.get("status")), f"at step {end.get('step', 0):,}"
    if locked:
        letter = read_process(pid)[0] if here else ""
        if here and not letter and silent > _PATIENCE:
            doubt = "it is in another container, or a child has outlived it"
            return "unknown", f"the folder is in use, but {process} is not to be seen: {doubt}; {since}"
        begun = any(event["time"] >= attempt.start["time"] for event in history.train.values())
        phase = sign.get("phase") if its_own else "training" if begun and not sign else "starting"
        return str(phase), f"{process}{', which is suspended' if letter in ('T', 't') else ''}"
    if not host:
        return "unknown", f"the folder has no lock, as a copy has none; {since}"
    if not here:
        return "unknown", f"whether {process} still runs can't be seen from this machine; {since}"
    if sign.get("started") and read_process(sign["pid"])[1] == sign["started"]:
        return "ending", f"{process} has released the folder"
    return "dead", f"{process} is gone"


def _list_companion_alarms(run: Path, state: str) -> Iterator[str]:
    """Loggers that fail now, and what loggers and mirror lack of a run that has ended."""
    for position, lines in list_unsent(run):
        if position.error or state not in _RUNNING:
            yield explain_unsent(run, position, lines)
    mirror = read_state(run)
    if mirror.url and not mirror.complete and state not in _RUNNING:
        yield explain_missing(run, mirror.url, mirror.error or "it was not sent")


def _list_alarms(history: History, attempt: Attempt, state: str, detail: str, silent: float) -> Iterator[str]:
    if state == "unknown":
        yield f"unknown: {detail}"
    patience = max(_FIRST_PATIENCE if state == "starting" else _PATIENCE, 3 * attempt.longest_silence)
    if state in _RUNNING and silent > patience:
        usual = f"the longest pause before was {format_duration(attempt.longest_silence)}"
        yield f"stalled: no line written for {format_duration(silent)}; {usual}"
    if state == "died":
        at = history.checkpoints[-1]["step"] if history.checkpoints else None
        again = f"resumes from step {at}" if at is not None else "starts from the beginning: there is no checkpoint"
        yield f"died: no process uses the folder, and the journal has no end; the same command {again}"
    failures = [
        (number, each.end)
        for number, each in enumerate(history.attempts, 1)
        if each.end and each.end.get("status") == "failed"
    ]
    for number, end in failures[-1:] if state != "completed" else ():
        subject = "" if state == "failed" and end is attempt.end else f"attempt {number} "
        cause = end.get("cause") or "summary.json says why"  # as an older version left it
        yield f"{subject}failed at step {end.get('step', 0):,}: {cause}"
    kinds: dict[str, list[dict[str, Any]]] = {}
    for fault in history.faults:
        kinds.setdefault(str(fault.get("kind")), []).append(fault)
    for kind, faults in kinds.items():
        times = f" ({len(faults)} times)" if len(faults) > 1 else ""
        yield f"{kind}{times}: at step {faults[-1].get('step')}: {faults[-1].get('action')}"
    loss = (history.last_train or {}).get("loss")
    if isinstance(loss, str):
        yield f"the loss is {loss}"


def _parse_float(value: Any) -> float | None:
    """A number of the journal, where non-finite numbers are strings."""
    return None if value is None else float(value)


Figures = Mapping[str, float]

_LESS_IS_BETTER = {"loss", "seconds", "ms", "bytes", "mae", "rmse", "mse", "error", "perplexity", "drawdown"}
_REPEATED = {"loss", "accuracy"}  # in `best`: the same as its val_loss and val_accuracy
_USUAL = ("val_accuracy", "val_reward", "val_loss", "train_loss")


def read_figures(run: Path) -> Figures:
    """The numbers by which a run can be compared: of its summary, or of its journal while it has none."""
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
    """The numbers of the runs, the best first; those without this figure, or with NaN, come last."""
    known = {name for each in figures for name in each}
    if key not in known:
        remedy = did_you_mean(key, known) if known else "runs that have an evaluation or a summary"
        raise RequestError(f"--sort-by {key}: no run has this metric", remedy=remedy)
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
