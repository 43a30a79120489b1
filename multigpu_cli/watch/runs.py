"""The runs below the named folders, whose journals are read on from where the last look ended; and what they show."""

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from threading import RLock

from multigpu_cli.commands.status import HOME
from multigpu_cli.errors import RequestError
from multigpu_cli.loggers.sender import JournalTail
from multigpu_cli.monitor.curves import CurveHistory, RunData, load_run
from multigpu_cli.monitor.history import JOURNAL, PLAN, find_run_folders
from multigpu_cli.monitor.run_state import STATE
from multigpu_cli.tune.trials import STUDY

_NEWEST = 1 << 20  # bytes of a long journal's end, which are read first
_KEPT = 200  # newest lines that stay complete
_LOOK = 3.0  # seconds between two looks for new runs


class RunFollower:
    """One run; of a long journal its end is there at once, and the rest when it has been read.

    Attributes:
        share: how much of the journal has been read, from its beginning: 0 to 1; None before its end was.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self._inode = folder, name, -1
        self.share: float | None = None

    def _begin(self) -> None:
        file = self.folder / JOURNAL
        size = file.stat().st_size
        self._newest, self._tail = CurveHistory(keep=_KEPT), JournalTail(file)
        self._whole, self._from_start = self._newest, self._tail
        self._files: dict[str, int] = {}
        self._data: RunData | None = None
        if size > 2 * _NEWEST:
            self._whole, self._from_start = CurveHistory(keep=_KEPT), JournalTail(file)
            for line in self._tail.read():  # the plan stands in the first start
                self._newest.add(line.event) if line.event else None
                if line.number == 100 or self._newest.attempts:
                    break
            with open(file, "rb") as journal:
                journal.seek(size - _NEWEST)
                self._tail.end = size - _NEWEST + len(journal.readline())

    def advance(self, seconds: float = 0.0) -> None:
        """Read what is new, and what is old for so many seconds at most."""
        found = (self.folder / JOURNAL).stat()
        inode, self._inode = self._inode, -1  # what can't be read is read anew, to the same end
        if found.st_ino != inode or found.st_size < self._tail.end:  # another journal is there
            self._begin()
        _read_on(self._tail, self._newest, None)
        if self._whole is not self._newest and seconds:
            _read_on(self._from_start, self._whole, time.monotonic() + seconds)
            if self._from_start.end >= self._tail.end:
                self._newest, self._tail = self._whole, self._from_start
        self._inode = found.st_ino
        self.share = 1.0 if self._whole is self._newest else self._from_start.end / self._tail.end

    def read(self) -> RunData:
        """The run as far as it was read."""
        history = self._newest
        if self._whole is not history:
            history.curves.before = self._whole.curves
            history = replace(history, evals=self._whole.evals | history.evals)
        files = {name: _time_of(self.folder / name) for name in ("config.yaml", "summary.json", PLAN)}
        if self._data is None or files != self._files:
            self._data, self._files = load_run(self.name, self.folder, history), files
        return replace(self._data, history=history)

    @property
    def version(self) -> str:
        """It changes with the files."""
        return f"{self._tail.end} {self._from_start.end} {sum(self._files.values())}"


def _read_on(tail: JournalTail, history: CurveHistory, until: float | None) -> None:
    for line in tail.read():
        if line.event:
            history.add(line.event)
        if until and line.number % 64 == 0 and time.monotonic() > until:
            return


def _time_of(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


class WatchedRuns:
    """The runs and studies below some folders, by an id that any address can hold; nothing else is ever read.

    RequestError: one of the folders is not there.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.roots = [Path(name) for name in names or [HOME]]
        for root in self.roots:
            if not root.is_dir():
                raise RequestError(f"{root}: no such folder", remedy="the --save-dir of a run, or a folder of runs")
        self.lock, self._looked = RLock(), -_LOOK
        self._runs: dict[str, RunFollower] = {}
        self._studies: dict[str, Path] = {}

    def _look(self) -> None:
        """Find runs and studies that are new, and forget those that were removed."""
        if time.monotonic() - self._looked < _LOOK:
            return
        runs, studies = dict[str, RunFollower](), dict[str, Path]()
        for root in self.roots:
            for folder in find_run_folders(root):
                if _stays(folder, root):
                    key = id_of(folder)
                    runs[key] = self._runs.get(key) or RunFollower(folder, self.name(folder))
            for folder in (file.parent for at in ("", "*/", "*/*/") for file in root.glob(at + STUDY)):
                if _stays(folder, root):
                    studies[id_of(folder)] = folder
        self._runs, self._studies, self._looked = runs, studies, time.monotonic()

    def name(self, folder: Path) -> str:
        """A folder as its root knows it; where there are several roots, as the user named it."""
        root = self.roots[0]
        return str(folder.relative_to(root)) if len(self.roots) == 1 and folder != root else str(folder)

    def list_runs(self) -> dict[str, RunFollower]:
        """All runs by id."""
        self._look()
        return self._runs

    def list_studies(self) -> dict[str, Path]:
        """The folders of all studies by id."""
        self._look()
        return self._studies

    def find(self, ids: Sequence[str]) -> list[RunFollower]:
        """The runs of these ids; RequestError: there is no such run."""
        runs = self.list_runs()
        if absent := [each for each in ids if each not in runs]:
            raise RequestError(f"{absent[0]}: no such run")
        return [runs[each] for each in ids]


def id_of(folder: Path) -> str:
    """What stands for a run or a study in addresses: a name may have any bytes."""
    return sha256(os.fsencode(folder)).hexdigest()[:12]


def _stays(folder: Path, root: Path) -> bool:
    """Whether what is read of a run or a study lies below the root, wherever links lead."""
    files = (JOURNAL, "summary.json", "config.yaml", PLAN, STATE, "checkpoints", STUDY, "trials")
    return all((folder / name).resolve().is_relative_to(root.resolve()) for name in files)
