"""The history of a run from its journal: its attempts, and the events that count; without torch."""

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from multigpu_cli.config.regular_files import open_regular
from multigpu_cli.config.schema import Config
from multigpu_cli.config.sources import gather
from multigpu_cli.errors import make_line
from multigpu_cli.monitor.journal import Event, parse_event, read_events, read_json

JOURNAL = "journal.jsonl"
PLAN = "plan.json"  # written by `plan --save-dir`, for the report


class Line(NamedTuple):
    """One line of a journal."""

    number: int  # counted from 1, or from where the reading began
    end: int  # bytes of the journal up to its end
    event: Event | None  # None if the line is no event


class JournalTail:
    """Reads the whole lines of a journal from byte `end` on; what is added later comes with the next call."""

    def __init__(self, path: Path, end: int = 0) -> None:
        self._path, self.end, self._lines = path, end, 0

    def read(self) -> Iterator[Line]:
        """The lines since the last call; none if there is no journal yet."""
        try:
            file = open_regular(self._path)
        except FileNotFoundError:
            return
        with file:
            file.seek(self.end)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # still being written
                self.end += len(line)
                self._lines += 1
                yield Line(self._lines, self.end, parse_event(line, self._path))


@dataclass
class Attempt:
    """One start of all processes, up to their end, which is None while it runs, or if it was killed."""

    start: Event
    last: float
    resumed_at: int = 0
    end: Event | None = None
    longest_silence: float = 0.0
    reached: int = 0


@dataclass
class History:
    """The events of one journal; those that a resume replaced by others do not count."""

    attempts: list[Attempt] = field(default_factory=list)
    train: dict[int, Event] = field(default_factory=dict)  # by step
    evals: dict[tuple[int, str], Event] = field(default_factory=dict)  # by step and split
    samples: dict[int, Event] = field(default_factory=dict)  # the answers to prompts, by step
    checkpoints: list[Event] = field(default_factory=list)
    faults: list[Event] = field(default_factory=list)
    recoveries: list[Event] = field(default_factory=list)  # the cost of each restart within a launch

    @property
    def plan(self) -> dict[str, Any]:
        """Of the last attempt."""
        return self.attempts[-1].start.get("plan", {}) if self.attempts else {}

    @property
    def last_train(self) -> Event | None:
        return self.train[max(self.train)] if self.train else None

    @property
    def step(self) -> int:
        """The known position in the schedule: the optimizer steps that are done or were skipped."""
        if not self.attempts:
            return 0
        ended = int((self.attempts[-1].end or {}).get("step", 0))
        return max([self.attempts[-1].resumed_at, ended, *self.train, *(step for step, _ in self.evals)])

    @property
    def steps_taken(self) -> int:
        """Optimizer steps done up to that position, where the task reports the skipped ones."""
        return int((self.last_train or {}).get("steps_taken", self.step))

    def follow(self, events: Iterable[Event | None]) -> Self:
        """Add the next events of the journal, of which a line may have none; returns this history."""
        for event in filter(None, events):
            self.add(event)
        return self

    def add(self, event: Event) -> None:
        """Add the next event."""
        if event["event"] == "start":
            self.attempts.append(Attempt(event, event["time"]))
            if not event.get("resumed_from"):
                self._forget_after(0)
            return
        if not self.attempts:
            return
        now = self.attempts[-1]
        now.longest_silence = max(now.longest_silence, event["time"] - now.last)
        now.last = max(now.last, event["time"])
        now.reached = max(now.reached, event.get("step") or 0)
        match event["event"]:
            case "resume":
                now.resumed_at = event["step"]
                self._forget_after(event["step"])
            case "train":
                self.train[event["step"]] = {"mean_loss": event.get("loss")} | event  # older journals have none
            case "eval":
                self.evals[event["step"], event["split"]] = event
            case "samples":
                self.samples[event["step"]] = event
            case "checkpoint":
                self.checkpoints.append(event)
            case "fault":
                self.faults.append(event)
            case "recovery":
                self.recoveries.append(event)
            case "end":
                now.end = event

    def _forget_after(self, step: int) -> None:
        self.train = {at: event for at, event in self.train.items() if at <= step}
        self.evals = {place: event for place, event in self.evals.items() if place[0] <= step}
        self.samples = {at: event for at, event in self.samples.items() if at <= step}


def load_history(folder: Path) -> History:
    """The history of the run in a folder, which must have a journal."""
    return History().follow(read_events(folder / JOURNAL))


def load_summary(folder: Path) -> dict[str, Any]:
    """Return the summary.json of a run folder, written when the run ends; {} if it is missing or unreadable."""
    return read_json(folder / "summary.json", "summary.json")


def load_config(folder: Path) -> Config | None:
    """Return the settings in the config.yaml of a run; None if it is missing or damaged. Warns of a damaged one.

    `verify`, which compares the settings, resolves the file itself: a damaged one is an error there.
    """
    file = folder / "config.yaml"
    try:
        open_regular(file).close()  # settings are read by name, and could follow a link
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn_of_damage(file, error.strerror)
        return None
    request = gather({}, [], str(file))
    if request.faults:
        _warn_of_damage(file, request.faults[0].problem)
        return None
    return request.config


def _warn_of_damage(file: Path, reason: str | None) -> None:
    """Warn of a file of a run; the run that it belongs to must not end the view of others."""
    warnings.warn(make_line(f"{file} is damaged, and not used: {reason}"), stacklevel=3)


def find_run_folders(folder: Path) -> list[Path]:
    """Run folders at this path or up to two levels below it, oldest first; warns of each journal that can't be read."""
    journals = [file for depth in ("", "*/", "*/*/") for file in folder.glob(depth + JOURNAL) if _is_readable(file)]
    return [file.parent for file in sorted(journals, key=lambda file: file.stat().st_mtime)]


def _is_readable(journal: Path) -> bool:
    """Return whether a journal can be opened; a link, a FIFO or a file of another user is named in a warning."""
    try:
        open_regular(journal).close()
    except OSError as error:
        _warn_of_damage(journal, error.strerror)
        return False
    return True
