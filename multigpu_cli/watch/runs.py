"""The runs below the named folders, whose journals are read on from where the last look ended; and what they show."""

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Self

from multigpu_cli.commands.status import HOME
from multigpu_cli.config.regular_files import open_regular
from multigpu_cli.errors import RequestError
from multigpu_cli.monitor.curves import CurveHistory, RunData, load_run
from multigpu_cli.monitor.history import JOURNAL, PLAN, JournalTail, find_run_folders
from multigpu_cli.monitor.run_state import STATE
from multigpu_cli.tune.trials import STUDY

_NEWEST = 1 << 20  # bytes of a long journal's end, which are read first
_HEAD = 100  # bytes that no other journal begins with: the time of the first start
_KEPT = 200  # newest lines that stay complete
_LOOK = 3.0  # seconds between two looks for new runs


class RunFollower:
    """One run; of a long journal its end is there at once, and the rest when it has been read."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.share: float | None = None  # of the journal that was read, from its beginning; None before its end was
        self.looked = 0.0  # when that was, by the monotonic clock
        self._head: bytes | None = None

    def _begin(self, size: int) -> None:
        file = self.folder / JOURNAL
        self._newest, self._tail = CurveHistory(keep=_KEPT), JournalTail(file)
        self._whole, self._from_start = self._newest, self._tail
        self._files: dict[str, int] = {}
        self._data: RunData | None = None
        if size > 2 * _NEWEST:
            self._whole, self._from_start = CurveHistory(keep=_KEPT), JournalTail(file)
            for line in self._tail.read():  # the plan stands in the first start
                self._newest.follow([line.event])
                if line.number == 100 or self._newest.attempts:
                    break
            with open_regular(file) as journal:
                journal.seek(size - _NEWEST)
                self._tail.end = size - _NEWEST + len(journal.readline())

    def advance(self, seconds: float = 0.0) -> None:
        """Read what is new, and what is old for so many seconds at most."""
        self.looked = time.monotonic()
        with open_regular(self.folder / JOURNAL) as journal:
            head, size = journal.read(_HEAD), os.fstat(journal.fileno()).st_size
        before, self._head = self._head, None  # what can't be read is read anew, to the same end
        if head != before or size < self._tail.end:  # a different journal replaced it
            self._begin(size)
        _read_on(self._tail, self._newest, None)
        if self._whole is not self._newest and seconds:
            _read_on(self._from_start, self._whole, time.monotonic() + seconds)
            if self._from_start.end >= self._tail.end:
                self._newest, self._tail = self._whole, self._from_start
        self._head = head
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
        history.follow([line.event])
        if until and line.number % 64 == 0 and time.monotonic() > until:
            return


def _time_of(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


class WatchedRuns:
    """The `runs`, and the folders of `studies`, below some folders, by an id that any address can hold.

    Nothing else is ever read. RequestError: one of the folders is missing.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.roots = [Path(name) for name in names or [HOME]]
        for root in self.roots:
            if not root.is_dir():
                raise RequestError(f"{root}: no such folder", remedy="the --save-dir of a run, or a folder of runs")
        self.lock, self._looked = Lock(), -_LOOK
        self.runs: dict[str, RunFollower] = {}
        self.studies: dict[str, Path] = {}
        self.look()

    def look(self) -> Self:
        """Find runs and studies that are new, and forget those that were removed."""
        if time.monotonic() - self._looked < _LOOK:
            return self
        runs, studies = dict[str, RunFollower](), dict[str, Path]()
        for root in self.roots:
            found = [file.parent for at in ("", "*/", "*/*/") for file in root.glob(at + STUDY)]
            studies |= {id_of(folder): folder for folder in found if _stays(folder, root)}
            trials = (each for folder in studies.values() for each in find_run_folders(folder / "trials"))
            for folder in (*find_run_folders(root), *trials):
                if _stays(folder, root):
                    key = id_of(folder)
                    runs[key] = self.runs.get(key) or RunFollower(folder, self.name(folder))
        self.runs, self.studies, self._looked = runs, studies, time.monotonic()
        return self

    def name(self, folder: Path) -> str:
        """A folder as its root knows it; where there are several roots, as the user named it."""
        root = self.roots[0]
        return str(folder.relative_to(root)) if len(self.roots) == 1 and folder != root else str(folder)

    def find(self, ids: Sequence[str]) -> list[RunFollower]:
        """The runs of these ids; RequestError: there is no such run."""
        if absent := [each for each in ids if each not in self.runs]:
            raise RequestError(f"{absent[0]}: no such run")
        return [self.runs[each] for each in ids]


def id_of(folder: Path) -> str:
    """What stands for a run or a study in addresses: a name may have any bytes."""
    return sha256(os.fsencode(folder)).hexdigest()[:12]


def _stays(folder: Path, root: Path) -> bool:
    """Whether what is read of a run or a study lies below the root, wherever links lead."""
    files = (JOURNAL, "summary.json", "config.yaml", PLAN, STATE, ".lock", "checkpoints", STUDY, "trials")
    return all(Path(os.path.realpath(folder / name)).is_relative_to(root.resolve()) for name in files)  # of a loop too
