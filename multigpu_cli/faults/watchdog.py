"""Knows where each rank is: ends a run that hangs, naming who did not arrive; finds out which rank failed first."""

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from torch import Tensor

from multigpu_cli.errors import RequestError, TrainingError
from multigpu_cli.faults import crash_report
from multigpu_cli.faults.diagnose import is_consequence
from multigpu_cli.faults.rank_failures import RankExit, RankExits
from multigpu_cli.runtime.world import World

PHASES = (
    "starting",
    "logging",
    "evaluating",
    "agreeing",
    "saving",
    "fetching data",
    "forward",
    "backward",
    "last backward",
    "reduction",
    "optimizer",
)
"""In the order of a step, from the edge where the one before ended: who is further on waits for the others."""

LONG = 1800.0  # seconds; loading, compiling and the first step may take their time
_PATIENCE = 0.5  # seconds for what the others have to say, who say it before they let their connections go
_ANSWER = 2.0  # seconds for every rank to say where it stands
_GRACE = 3.0  # seconds that the others let the one who speaks go first
_WRITING = 60.0  # seconds to write down how it ended


@dataclass(frozen=True)
class RankPosition:
    """Where a rank stands.

    Attributes:
        steps: optimizer steps done.
        phase: one of PHASES.
        line: the innermost line of code that is neither torch's nor Python's own.
    """

    rank: int
    steps: int
    phase: str
    line: str

    @property
    def order(self) -> tuple[int, int]:
        return self.steps, PHASES.index(self.phase)

    def __str__(self) -> str:
        return f"{self.phase}, {self.steps} steps done" + (f", at {self.line}" if self.line else "")


class Watchdog:
    """Follows one rank; a thread beside it notices when nothing moves any more, on no rank.

    Progress is the next phase of a step, a batch fetched or evaluated, a step of an environment, and a piece of
    a file that has reached the disk. Who waits for another rank waits for as long as that one moves.

    Args:
        timeout: seconds without progress, once a step is done; before that it is half an hour, or this if longer.
        on_fatal_error: tells the user why a process ends that can't raise any more; called on one rank for all.
    """

    def __init__(self, world: World, timeout: float, on_fatal_error: Callable[[TrainingError], None]) -> None:
        self._world, self._timeout, self._on_fatal_error = world, timeout, on_fatal_error
        self._ends = RankExits(world)
        self.resting = False  # between two calls of somebody else's loop, who may take any time
        self._logs: Path | None = None
        self._begins_at: int | None = None
        self._steps, self._phase, self._samples = 0, "starting", None  # type: int, str, Tensor | None
        self._moves, self._moved = 0, time.time()
        self._explained: BaseException | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)
        self.on_end: Callable[[TrainingError], None] = lambda error: None

    def set_position(self, steps: int, phase: str, samples: Tensor | None = None) -> None:
        """Note where this rank stands: progress, if it says so often enough."""
        self._steps, self._phase, self._samples = steps, phase, samples
        self.mark_progress()

    @property
    def phase(self) -> str:
        """Where this rank stands: one of PHASES."""
        return self._phase

    def mark_progress(self) -> None:
        """Progress within a phase; any thread may tell it."""
        self._moves += 1
        self._moved = time.time()

    def start(self, steps: int, logs: Path) -> None:
        """Training begins, after so many steps; reports go into this folder."""
        self._begins_at, self._steps, self._logs = steps, steps, logs
        with suppress(OSError):  # the run folder may lie on another machine: then reports are made there
            logs.mkdir(exist_ok=True)

    def root_cause(self, error: BaseException) -> BaseException:
        """What to raise for an error that ends this rank: itself, or another rank's that it only follows from."""
        if self._explained is None:
            self._explained = self._find_root_cause(error)
        return self._explained

    def record_stop(self) -> None:
        """All ranks leave together: word of it for the next attempt, if the launcher makes one."""
        self._ends.record_cause(f"stopped in good order at step {self._steps}", self._steps_done(), self._moved)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(timeout=_ANSWER)  # it may be asking a store that has gone
        if error is not None and (told := self.root_cause(error)) is not error:
            raise told from error

    def _find_root_cause(self, error: BaseException) -> BaseException:
        wrong = isinstance(error, RequestError) and self._world.size == 1
        if wrong or getattr(error, "shared", False) or not isinstance(error, Exception):
            return error
        error.failed_at = self._steps_done()  # type: ignore[attr-defined]
        own = self._end(error)
        self._ends.publish(own)
        if own.consequence:
            return self._lost_peer_error(self._ends.wait_for_exits(patience=_PATIENCE))
        self._report(error, self._ends.wait_for_exits())
        return error

    def _lost_peer_error(self, ends: list[RankExit]) -> TrainingError:
        """The error of a rank that only lost others; the lowest rank that still speaks does so for all."""
        error = crash_report.lost_peer_error(ends, self._world.size, self._steps_done(), self._logs)
        error.failed_at = self._steps_done()
        innocent = [end.rank for end in ends if end.consequence]
        error.shared = min([*innocent, self._world.rank]) != self._world.rank
        if not error.shared:
            self._report(error, ends)
        return error

    def _report(self, error: BaseException, ends: list[RankExit]) -> None:
        """For the next attempt, and for people."""
        self._ends.record_cause(crash_report.summary_line(error), self._steps_done(), self._moved)
        with suppress(OSError), self._file(f"crash_{self._world.attempt}.txt") as file:  # the disk may be what failed
            file.write(crash_report.full_report(error, ends))

    def _end(self, error: Exception) -> RankExit:
        named = isinstance(error, TrainingError)
        told = str(error) if named else f"{type(error).__name__}: {error}"
        line = [] if named else [f"in {_innermost(traceback.extract_tb(error.__traceback__))}"]
        return RankExit(
            rank=self._world.rank,
            place=f"{self._phase}, {self._steps} steps done",
            problem="\n".join([told, *getattr(error, "__notes__", ()), *line]),
            stack="".join(traceback.format_exception(error)),
            consequence=is_consequence(error),
            exit_code=error.exit_code if isinstance(error, TrainingError) else TrainingError.exit_code,
            samples=[] if self._samples is None else self._samples.tolist(),
        )

    def _steps_done(self) -> int | None:
        """Steps done, or None where this attempt has not done one."""
        return None if self._begins_at is None or self._steps == self._begins_at else self._steps

    def _look(self) -> None:
        """The thread: wakes now and then, and looks whether anything moved, here and elsewhere."""
        limit = max(self._timeout, LONG)
        pause, group = min(1.0, self._timeout / 10), _Group(self._ends, self._timeout / 10)
        seen, since, last = -1, time.monotonic(), time.monotonic()
        while not self._over.wait(pause):
            now = time.monotonic()
            asleep = now - last > pause + 0.5 * self._timeout  # the whole process was
            elsewhere = group.poll_progress(self._moves, now)  # asked in any case: the others hear of this rank by it
            if self._moves != seen or self.resting or asleep or elsewhere:
                seen, since = self._moves, now
            last = now
            if self._steps_done() is not None and limit != self._timeout:
                limit, since = self._timeout, now
            if now - since > limit or self._ends.is_hang():
                self._leave(partial(self._hang, max(now - since, self._timeout)))
            elif self._ends.has_exits() and not self._over.wait(_PATIENCE) and self._explained is None:
                self._leave(
                    lambda: self._lost_peer_error(self._ends.wait_for_exits())
                )  # NCCL never tells who waits that a peer has gone

    def _leave(self, found: Callable[[], TrainingError]) -> None:
        """End this process from beside: its main thread can't be woken from a collective."""
        threading.Thread(target=self._leave_unwritten, name="leaving", daemon=True).start()
        try:
            error = found()
            if error.shared:
                time.sleep(_GRACE if self._world.local_rank else 0)
            else:
                self.on_end(error)
                self._on_fatal_error(error)
        finally:
            os._exit(TrainingError.exit_code)

    def _leave_unwritten(self) -> None:
        """A file system that hangs may be what nothing moves for, and who writes of it there would hang, too."""
        time.sleep(_WRITING)
        try:
            problem = f"the run can't go on, and {self._logs} takes no word of why within {_WRITING:.0f} s"
            self._on_fatal_error(TrainingError(problem, remedy="look whether that file system answers"))
        finally:
            os._exit(TrainingError.exit_code)

    def _hang(self, still: float) -> TrainingError:
        """Write down what every thread does, and say who did not arrive."""
        self._ends.call_hang()
        with suppress(OSError), self._file(f"stacks_{self._world.attempt}_rank_{self._world.rank}.txt") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        places = self._places()
        error = crash_report.hang_error(places, self._world.size, still, self._logs)
        error.failed_at = self._steps_done()
        error.shared = min(place.rank for place in places) != self._world.rank
        if not error.shared:
            self._ends.record_cause(crash_report.summary_line(error), self._steps_done(), self._moved)
        return error

    def _places(self) -> list[RankPosition]:
        """Where everyone stands who still answers, in rank order."""
        here = RankPosition(self._world.rank, self._steps, self._phase, _line(sys._current_frames()))
        if (store := self._ends.store) is None:
            return [here]
        deadline, names = time.monotonic() + _ANSWER, [f"place-{rank}" for rank in range(self._world.size)]
        try:
            store.set(f"place-{here.rank}", json.dumps(asdict(here)))
            while not store.check(names) and time.monotonic() < deadline:
                time.sleep(0.05)
            return [RankPosition(**json.loads(store.get(name))) for name in names if store.check([name])]
        except RuntimeError:  # nobody answers without the store
            return [here]

    def _file(self, name: str) -> Any:
        if self._logs is None:
            return open(os.devnull, "w")
        return open(self._logs / name, "w")


class _Group:
    """Whether some other rank has moved, asked every so many seconds.

    Args:
        pause: seconds.
    """

    def __init__(self, ends: RankExits, pause: float) -> None:
        self._ends, self._pause = ends, pause
        self._asked, self._reported, self._total = time.monotonic(), 0, 0

    def poll_progress(self, own: int, now: float) -> bool:
        """Tell the others how often this rank has moved in all; whether they moved since they were last asked."""
        if now - self._asked < self._pause:
            return False
        mine, self._asked = own - self._reported, now
        total = self._ends.count_moves(mine)
        if total is None:
            return False
        before, self._total, self._reported = self._total, total, own
        return total - mine > before


def _line(frames: Mapping[int, FrameType]) -> str:
    """The innermost line of the main thread that is the user's or ours."""
    return _innermost(traceback.extract_stack(frames[threading.main_thread().ident or 0]))


def _innermost(stack: Sequence[traceback.FrameSummary]) -> str:
    theirs = [frame for frame in stack if "site-packages" not in frame.filename and not _of_python(frame.filename)]
    return f"{theirs[-1].filename}:{theirs[-1].lineno} in {theirs[-1].name}" if theirs else ""


def _of_python(file: str) -> bool:
    return file.startswith((str(Path(os.__file__).parent), "<frozen"))
