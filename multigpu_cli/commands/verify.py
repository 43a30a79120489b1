"""Comparison of two runs: whether they are the same, or their first difference. Reads only their folders, no torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multigpu_cli.config.resume_rules import flatten_settings
from multigpu_cli.config.schema import SETTINGS
from multigpu_cli.config.sources import resolve
from multigpu_cli.errors import RequestError, make_line
from multigpu_cli.monitor.history import JOURNAL, load_history, load_summary

_RESOLVED = (  # in the plan of the `start` event: the values that _SETTINGS_OF_THE_PLAN lead to
    "contents samples batch_size global_batch_size drop_last learning_rate schedule warmup_steps total_steps precision"
)
_SETTINGS_OF_THE_PLAN = (
    "data model task batch_size grad_accum_steps global_batch_size drop_last lr base_lr base_batch_size lr_scaling "
    "schedule warmup_epochs amp"
)
_SHOULD_NOT_MATTER = (
    "exact compile grad_checkpointing bucket_cap_mb strategy.param_dtype strategy.reduce find_unused_parameters "
    "grad_compression"
)
_NO_PROMISE = "identical here; without --exact this is not guaranteed on another number of workers"
_ROUNDING = "without --exact, another number of workers sums in another order: results are equal only to rounding"
_TRAIN = ("loss", "grad_norm", "lr", "samples")
_POSITION = {"event", "time", "epoch", "step", "split"}


@dataclass(frozen=True)
class Divergence:
    """The first difference between two journals, at a step of training or in an evaluation's split."""

    step: int
    what: str
    name: str
    values: tuple[Any, Any]
    relative: float | None


@dataclass(frozen=True)
class Comparison:
    """The result of comparing two runs: of their final weights, as fingerprints, and of their journals."""

    runs: tuple[str, str]
    same: bool
    fingerprints: tuple[str | None, str | None]
    parting: Divergence | None
    agreed_until: int  # the last step before their parting at which both wrote a line, 0 without one
    lines: int
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class RunTrace:
    """The records of one run; lines are by (step, order, what), without the steps that a resume replaced."""

    folder: str
    settings: dict[str, Any]
    start: dict[str, Any]
    lines: dict[tuple[int, int, str], dict[str, Any]]
    summary: dict[str, Any]

    @property
    def fingerprint(self) -> str | None:
        return self.summary.get("fingerprint") if self.summary.get("status") == "completed" else None


def compare_runs(run_a: str, run_b: str) -> Comparison:
    """Compare two run folders; RequestError: no run, other settings, or one is not over and shows no difference yet."""
    a, b = _open_run(run_a), _open_run(run_b)
    if differing := list(_list_setting_differences(a, b)):
        listed = "\n".join(f"    {line}" for line in differing)
        problem = f"{run_a} and {run_b} can't be compared: they are runs with different settings:\n{listed}"
        remedy = "two runs that differ only in the number of workers, or in where and how they ran"
        raise RequestError(problem, remedy=remedy)
    both = [place for place in sorted(a.lines) if place in b.lines]
    parting = next(_find_divergences(a, b, both), None)
    before = [step for step, _, _ in both if parting is None or step < parting.step]
    prints = (a.fingerprint, b.fingerprint)
    if None in prints and not parting:
        run = a if a.fingerprint is None else b
        agree = f"all steps and evaluations that both logged agree ({len(both)})" if both else "no step is in both"
        status = run.summary.get("status", "not over")
        problem = f"{run.folder} has no fingerprint, because it is {make_line(str(status))}; so far {agree}"
        raise RequestError(problem, remedy="let it run to its end")
    same = None not in prints and prints[0] == prints[1]
    agreed_until, notes = max(before, default=0), list(_list_notes(a, b, parting))
    return Comparison((run_a, run_b), same, prints, parting, agreed_until, len(both), notes)


def format_comparison(comparison: Comparison) -> Iterator[str]:
    """The verdict, and where the runs first differ."""
    parting, runs, lines = comparison.parting, comparison.runs, comparison.lines
    agreement = f"all steps and evaluations that both logged agree ({lines})" if lines else "no step is in both"
    if comparison.same:
        yield f"same: {comparison.fingerprints[0]}"
        yield "  the final weights are equal, but not what was logged" if parting else f"  {agreement}"
    else:
        yield "different: " + " and ".join(digest or "not completed" for digest in comparison.fingerprints)
    if parting:
        upto = f", equal up to step {comparison.agreed_until}" if comparison.agreed_until else ""
        yield f"  they first differ at step {parting.step}{upto}: {parting.what} {parting.name}"
        width = max(map(len, runs))
        yield from (f"    {run:<{width}}  {value!r}" for run, value in zip(runs, parting.values, strict=True))
        if parting.relative is not None:
            yield f"    relative difference {parting.relative:.2g}"
    elif not comparison.same:
        yield f"  {agreement}: --log-interval 1 shows where they differ"
    yield from (f"  note: {note}" for note in comparison.notes)


def _open_run(folder: str) -> RunTrace:
    path = Path(folder)
    if not (path / JOURNAL).is_file():
        raise RequestError(f"{folder} has no run: there is no journal.jsonl", remedy="the --save-dir of a run")
    try:
        history = load_history(path)
    except OSError as error:
        problem = f"{path / JOURNAL} can't be read: {error.strerror}"
        raise RequestError(problem, remedy="name a run whose journal is a regular file that you can read") from error
    start = history.attempts[-1].start if history.attempts else {}
    lines = {(step, 0, "train"): {name: event.get(name) for name in _TRAIN} for step, event in history.train.items()}
    for (step, split), event in history.evals.items():
        fields = {name: value for name, value in event.items() if name not in _POSITION}
        lines[step, 1 + (split == "test"), split] = fields
    config = resolve({}, [], str(path / "config.yaml"))
    return RunTrace(folder, flatten_settings(config), start, lines, load_summary(path))


def _list_setting_differences(a: RunTrace, b: RunTrace) -> Iterator[str]:
    """The settings whose difference makes two runs incomparable, with both values."""
    plans = (a.start.get("plan", {}), b.start.get("plan", {}))
    yield from _list_unequal(_RESOLVED.split(), *plans)
    compared = {key for key, setting in SETTINGS.items() if not setting.free and key in a.settings}
    compared -= {*_SETTINGS_OF_THE_PLAN.split(), *_SHOULD_NOT_MATTER.split()}
    yield from _list_unequal([key for key in SETTINGS if key in compared], a.settings, b.settings)


def _list_notes(a: RunTrace, b: RunTrace, parting: Divergence | None) -> Iterator[str]:
    """Differences that should not change the numbers, or only their rounding."""
    yield from _list_unequal(_SHOULD_NOT_MATTER.split(), a.settings, b.settings)
    yield from _list_unequal(["world_size", "versions", "devices"], a.start, b.start)
    yield from _list_unequal(["device", "threads"], a.start.get("plan", {}), b.start.get("plan", {}))
    sizes = {a.start.get("world_size"), b.start.get("world_size")}
    if len(sizes) > 1 and not (a.settings["exact"] and b.settings["exact"]):
        yield _ROUNDING if parting or a.fingerprint != b.fingerprint else _NO_PROMISE
        if parting and (parting.relative or 0.0) > 1e-5:
            yield "more than 1e-5 is mostly of a bias before BatchNorm (use bias=False), or of BatchNorm's statistics"


def _list_unequal(names: list[str], one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    for name in names:
        if one.get(name) != other.get(name):
            yield make_line(f"{name}: {one.get(name)} and {other.get(name)}")


def _find_divergences(a: RunTrace, b: RunTrace, places: list[tuple[int, int, str]]) -> Iterator[Divergence]:
    for place in places:
        one, other = a.lines[place], b.lines[place]
        for name in sorted(one.keys() | other.keys()) if place[1] else _TRAIN:
            if one.get(name) != other.get(name):
                values = one.get(name), other.get(name)
                yield Divergence(place[0], place[2], name, values, _relative_difference(*values))


def _relative_difference(one: Any, other: Any) -> float | None:
    """The difference relative to the greater value; None if one of them is not finite."""
    if not (isinstance(one, (int, float)) and isinstance(other, (int, float))):
        return None
    return abs(one - other) / (max(abs(one), abs(other)) or 1.0)
