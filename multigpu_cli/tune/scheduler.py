"""What runs next, and on how many slots: pure functions of the trials and of measured times, without processes.

`order: fixed` decides where all of a generation that were sent to a rung are there: so no decision depends on a clock.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import le
from statistics import median
from typing import Any, NamedTuple

from multigpu_cli.tune.trials import Study, Trial


class Decision(NamedTuple):
    """Trials that go on to their next rung, or how many new ones are proposed; neither: wait, or the end."""

    promote: Sequence[Trial] = ()
    ask: int = 0


def decide(study: Study, trials: Sequence[Trial], idle: bool) -> Decision:
    """The next decision; `idle`: a slot is free, and no trial waits for one."""
    if study.order == "async":
        return _decide_async(study, trials) if idle else Decision()
    first = max(0, len(trials) - 1) // study.generation * study.generation
    current, size = trials[first:], min(study.generation, study.trials - first)
    if len(current) < size:  # also after a driver was killed while it wrote them
        return Decision(ask=size - len(current))
    for rung in range(len(study.rungs)):
        there = [trial for trial in current if trial.rung >= rung]
        if any(trial.state == "waiting" and trial.rung == rung for trial in there):
            return Decision()
        if rung < len(study.rungs) - 1 and (chosen := _choose_next(study, there, rung, least=1)):
            return Decision(chosen)
    return Decision(ask=min(study.generation, study.trials - len(trials)))


def _decide_async(study: Study, trials: Sequence[Trial]) -> Decision:
    """The best trial that pauses on the highest rung from which more may go on, or else a new one."""
    last = len(trials) == study.trials and not any(trial.state == "waiting" for trial in trials)
    for rung in reversed(range(len(study.rungs) - 1)):
        there = [trial for trial in trials if trial.rung > rung or (trial.rung == rung and trial.state != "waiting")]
        if chosen := _choose_next(study, there, rung, least=int(last)):  # in the end one from each rung at least
            return Decision(chosen[:1])
    return Decision(ask=min(1, study.trials - len(trials)))


def _choose_next(study: Study, there: Sequence[Trial], rung: int, least: int) -> list[Trial]:
    """The best that may still go on from a rung: as many as let each rung cost about the same; of equals the first."""
    gone = sum(trial.rung > rung and trial.state not in ("failed", "diverged") for trial in there)  # else replaced
    count = max(least, len(there) * study.rungs[rung] // study.rungs[rung + 1]) - gone
    paused = [trial for trial in there if trial.state == "paused" and trial.rung == rung]
    ordered = sorted(paused, key=lambda trial: (*(-value for value in trial.score(study)), trial.number))
    return ordered[: max(0, count)]


def rank_trials(study: Study, trials: Sequence[Trial]) -> list[Trial]:
    """Those with a value: first which came furthest, among these the best; with several objectives the front."""
    if len(study.objectives) > 1:
        return list_front(study, trials)
    known = [trial for trial in trials if trial.values]
    return sorted(known, key=lambda each: (-max(each.values), *(-value for value in each.score(study)), each.number))


def list_needed(study: Study, trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials whose checkpoints the study may still use: the best ones, and those that may continue."""
    best = rank_trials(study, trials)[: None if len(study.goals) > 1 else 1]
    # earlier generations are decided for good; without order, a paused trial may continue even if --trials grows later
    last = max(0, len(trials) - 1) // study.generation * study.generation if study.order == "fixed" else 0
    is_over = study.order == "fixed" and not any(decide(study, trials, idle=True))
    states = ["waiting"] if is_over else ["waiting", "paused"]
    return best + [trial for trial in trials[last:] if trial.state in states]


def plan_epochs(study: Study) -> tuple[int, int]:
    """Epochs that the study trains, and starts of runs, where no trial fails."""
    epochs = starts = 0
    for first in range(0, study.trials, study.generation):
        count, before = min(study.generation, study.trials - first), 0
        for length in study.rungs:
            count = max(1, count * before // length) if before else count
            epochs, starts, before = epochs + count * (length - before), starts + count, length
    return epochs * study.seeds, starts * study.seeds


class Job(NamedTuple):
    """One run of a trial, up to a rung."""

    trial: int
    run: int  # number of the seed
    epochs: int  # at its end
    micro_batches: int  # of a step

    def widen(self, width: int, most: int) -> int:
        """The next number of workers, up to `most`, with which each has fewer micro-batches in a step; 0: none."""
        passes = -(-self.micro_batches // width)
        return next((more for more in range(width + 1, most + 1) if -(-self.micro_batches // more) < passes), 0)


@dataclass
class Speeds:
    """Measured: samples per second, by trial and workers; seconds of starts."""

    rates: dict[int, dict[int, float]] = field(default_factory=dict)
    starts: list[float] = field(default_factory=list)

    def speedup(self, before: int, after: int) -> float:
        """How much faster a job is on `after` workers than on `before`; as many times as workers where nobody knows."""
        known = [each[after] / each[before] for each in self.rates.values() if before in each and after in each]
        return median(known) if known else after / before


def assign_slots(waiting: Mapping[Job, float], free: int, least: int, speeds: Speeds) -> dict[Job, int]:
    """Which jobs, with their time on the least slots, start on how many; what is left goes where it helps most."""
    starting = dict.fromkeys(list(waiting)[: free // least], least)
    left = free - least * len(starting)
    while left and len(starting) == len(waiting):
        times = {job: waiting[job] / speeds.speedup(least, width) for job, width in starting.items()}
        needs = {job: (width, width + left, times[job]) for job, width in starting.items()}
        if not (chosen := choose_widening(needs, speeds, cost=0.0)):
            break
        left, starting[chosen[0]] = left - chosen[1] + starting[chosen[0]], chosen[1]
    return starting


def choose_widening(
    running: Mapping[Job, tuple[int, int, float]], speeds: Speeds, cost: float
) -> tuple[Job, int] | None:
    """Which of these, with their slots, the most they could get, and their time, gains most, and more than the cost."""
    gains = {
        (job, wider): seconds * (1 - 1 / speeds.speedup(width, wider))
        for job, (width, most, seconds) in sorted(running.items())
        if (wider := job.widen(width, most))
    }
    chosen = max(gains, key=gains.__getitem__, default=None)  # of equal ones the first
    return chosen if chosen and gains[chosen] > cost else None


def measure_use(events: Iterable[Mapping[str, Any]]) -> tuple[float, float, float]:
    """Return the seconds of slots that runs held, and in which these did not train, and all from a driver's start on.

    A run does not train while its process starts and ends.
    """
    busy = starting = total = 0.0
    slots = held = 0
    for event, after in pairwise(events):
        if (kind := event["event"]) == "open":
            slots, held = event["slots"], 0
        starting += event.get("slots", 0) * event.get("start_seconds", 0.0)
        held += event.get("slots", 0) * {"start": 1, "end": -1}.get(kind, 0)
        if kind != "close" and after["event"] != "open":
            seconds = after["time"] - event["time"]
            busy, total = busy + held * seconds, total + slots * seconds
    return busy, starting, total


def list_front(study: Study, trials: Sequence[Trial]) -> list[Trial]:
    """The whole trials than which no other is better in every objective; first what adds most to their hypervolume."""
    whole = [trial for trial in trials if trial.state == "completed"]
    points = {trial.number: trial.score(study) for trial in whole}
    better = {own: any(own != its and all(map(le, own, its)) for its in points.values()) for own in points.values()}
    front = [trial for trial in whole if not better[points[trial.number]]]
    corner = [min(values) for values in zip(*points.values(), strict=True)]  # the worst that any trial has

    def lost_without(trial: Trial) -> float:
        others = [points[each.number] for each in front if each is not trial]
        return _hypervolume([*others, points[trial.number]], corner) - _hypervolume(others, corner)

    return sorted(front, key=lambda trial: (-lost_without(trial), trial.number))


def _hypervolume(points: Sequence[Sequence[float]], corner: Sequence[float]) -> float:
    """The volume between the corner and the points: of what at least one of them dominates, by slices."""
    if not corner or not points:
        return float(bool(points))
    volume, floor = 0.0, corner[-1]
    for height in sorted({point[-1] for point in points}):
        above = [point[:-1] for point in points if point[-1] >= height]
        volume, floor = volume + (height - floor) * _hypervolume(above, corner[:-1]), height
    return volume
