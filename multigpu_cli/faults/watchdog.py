"""Ends a run in which no rank makes progress any more, and names the rank that the others wait for."""

import faulthandler
import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Self

from torch import Tensor

from multigpu_cli.distributed.world import World, find_communication_error
from multigpu_cli.errors import GRACE, TrainingError
from multigpu_cli.faults.explain import describe_innermost_line, extract_main_thread_stack
from multigpu_cli.faults.rank_exits import OwnProgress, RankExits, RankPosition
from multigpu_cli.faults.root_cause import PATIENCE, WAITED, RootCauseFinder, hang_error, summary_line

STARTUP_TIMEOUT = 1800.0  # seconds; loading, compiling and the first step may take long
_ANSWER = 2.0  # seconds for every rank to publish its position
_WRITING = 60.0  # seconds to write the reports


class Watchdog:
    """Follows one rank; a thread notices when no rank makes progress any more.

    Progress is the next phase of a step, a batch fetched or evaluated, a step of an environment, and a piece of a file
    that has reached the disk. A rank that waits for another one waits for as long as that one makes progress.

    The timeout is seconds without progress, once a step is done; before that it is half an hour, or this if longer.
    `on_fatal_error` shows the error of a process that can't raise it any more, on one rank for all; `before_fatal_exit`
    is called with it before that. While it is `paused`, between two calls of the user's loop, no progress is expected.
    """

    def __init__(self, world: World, timeout: float, on_fatal_error: Callable[[TrainingError], None]) -> None:
        self._world, self._timeout, self._on_fatal_error = world, timeout, on_fatal_error
        self._exits, self.own = RankExits(world), OwnProgress()
        self._cause = RootCauseFinder(world, self._exits, self.own)
        self.paused = False
        self.before_fatal_exit: Callable[[TrainingError], None] = lambda error: None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._monitor, name="watch", daemon=True)

    def set_position(self, steps: int, phase: str, samples: Tensor | None = None) -> None:
        """Update the position of this rank, which is progress."""
        own = self.own
        if steps != own.steps:
            own.arrivals = 0
        own.steps, own.phase, own.samples = steps, phase, samples
        own.moves, own.last_move = own.moves + 1, time.time()  # as `mark`, which each phase of a step would call

    def count_arrival(self) -> None:
        """This rank comes to where it waits for all others in the middle of a phase, which is progress."""
        self.own.arrivals += 1
        self.own.mark()

    def mark_progress(self) -> None:
        """Progress within a phase; any thread may call it."""
        self.own.mark()

    def start(self, steps: int, logs: Path) -> None:
        """Training begins, after so many steps; reports are written to this folder."""
        self.own.first_step, self.own.steps, self.own.logs = steps, steps, logs
        with suppress(OSError):  # the run folder may be on another machine, where it is made
            logs.mkdir(exist_ok=True)

    def publish_and_find_root_cause(self, error: BaseException) -> BaseException:
        """What to raise for an error that ends this rank: itself, or the error of another rank which caused it."""
        return self._cause.find(error)

    def record_stop(self) -> None:
        """Record for the next attempt, if there is one, that all ranks stopped together."""
        self._cause.record(f"stopped in good order at step {self.own.steps}")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._closed.set()
        self._thread.join(timeout=_ANSWER)  # it may wait for a store that is gone
        cause = None if error is None else self.publish_and_find_root_cause(error)
        self._exits.flag_departure()
        if cause is not None and cause is not error:
            raise cause from error

    def _monitor(self) -> None:
        """The thread: checks now and then whether this rank or any other has made progress."""
        limit = max(self._timeout, STARTUP_TIMEOUT)
        interval, peers = min(1.0, self._timeout / 10), _PeerProgress(self._exits, self._timeout / 10)
        seen, since, last = -1, time.monotonic(), time.monotonic()
        while not self._closed.wait(interval):
            now = time.monotonic()
            suspended = now - last > interval + 0.5 * self._timeout  # the whole process was
            elsewhere = peers.poll(self.own.moves, now)  # in any case: it also tells the others of this rank's
            if self.own.moves != seen or self.paused or suspended or elsewhere:
                seen, since = self.own.moves, now
            last = now
            if self.own.steps_done() is not None and limit != self._timeout:
                limit, since = self._timeout, now
            if now - since > limit or self._exits.is_hang():
                self._terminate_process(partial(self._report_hang, max(now - since, self._timeout)))
            elif self._cause.found is None and (problem := self._describe_lost_peer()):
                # unless the main thread notices soon, this process is ended: NCCL never tells who waits
                self._cause.publish_lost_peer(problem)
                if not self._closed.wait(PATIENCE) and self._cause.keep_main_thread_from_reporting():
                    self._terminate_process(self._cause.find_for_lost_peer)

    def _describe_lost_peer(self) -> str:
        """Return the reason to treat a peer as lost, or "": torch would let this rank wait for minutes."""
        if name := find_communication_error():
            problem = f"NCCL reports {name}: another rank, its node or the network between them failed"
            remedy = "check that node and the network; NCCL_DEBUG=INFO shows more; the same command resumes"
            return str(TrainingError(problem, remedy=remedy))
        return WAITED if self._exits.has_exits() or self._exits.has_killed_ranks() else ""

    def _terminate_process(self, find_error: Callable[[], TrainingError]) -> None:
        """End this process from its thread, since the main thread can't be woken from a collective."""
        threading.Thread(target=self._exit_if_disk_hangs, name="leaving", daemon=True).start()
        try:
            error = find_error()
            if error.shared:
                # once a peer was killed, the agent ends all ranks anyway, by SIGKILL after half a minute
                time.sleep(GRACE if self._world.local_rank and not self._exits.has_killed_ranks() else 0)
            else:
                self.before_fatal_exit(error)
                self._on_fatal_error(error)
        finally:
            os._exit(TrainingError.exit_code)

    def _exit_if_disk_hangs(self) -> None:
        """A file system that does not answer may be the cause of the hang, and writing reports to it would hang too."""
        time.sleep(_WRITING)
        try:
            problem = f"the run can't continue, and no report could be written to {self.own.logs} in {_WRITING:.0f} s"
            self._on_fatal_error(TrainingError(problem, remedy="check whether that file system answers"))
        finally:
            os._exit(TrainingError.exit_code)

    def _report_hang(self, seconds: float) -> TrainingError:
        """Write the stacks of all threads to a file; the error names the rank that did not arrive."""
        self._exits.flag_hang()
        name = f"stacks_{self._world.attempt}_rank_{self._world.rank}.txt"
        with suppress(OSError), self.own.open_report(name) as file:
            faulthandler.dump_traceback(file, all_threads=True)
        positions = self._collect_positions()
        error = hang_error(positions, self._world.size, seconds, self.own.logs)
        error.failed_at = self.own.steps_done()
        error.shared = min(position.rank for position in positions) != self._world.rank
        if not error.shared:
            self._cause.record(summary_line(error))
        return error

    def _collect_positions(self) -> list[RankPosition]:
        """The positions of all ranks that still answer, in rank order."""
        here = self.own
        line = describe_innermost_line(extract_main_thread_stack())
        own = RankPosition(self._world.rank, here.steps, here.phase, line, here.arrivals)
        if (store := self._exits.store) is None:
            return [own]
        deadline, names = time.monotonic() + _ANSWER, [f"place-{rank}" for rank in range(self._world.size)]
        try:
            store.set(f"place-{own.rank}", json.dumps(asdict(own)))
            while not store.check(names) and time.monotonic() < deadline:
                time.sleep(0.05)
            return [RankPosition(**json.loads(store.get(name))) for name in names if store.check([name])]
        except RuntimeError:  # without the store no rank can be asked
            return [own]


class _PeerProgress:
    """Whether another rank has made progress, asked once per interval (seconds)."""

    def __init__(self, exits: RankExits, interval: float) -> None:
        self._exits, self._interval = exits, interval
        self._asked, self._reported, self._total = time.monotonic(), 0, 0

    def poll(self, own: int, now: float) -> bool:
        """Add this rank's progress (`own` moves so far) to the total; whether other ranks have added to it."""
        if now - self._asked < self._interval:
            return False
        new, self._asked = own - self._reported, now
        total = self._exits.add_progress(new)
        if total is None:
            return False
        before, self._total, self._reported = self._total, total, own
        return total - new > before
