"""Finds the error that ended a run: that of this rank, or the one of another rank that caused it."""

import traceback
from contextlib import suppress

from multigpu_cli.errors import RequestError, TrainingError
from multigpu_cli.faults import failure_messages
from multigpu_cli.faults.interpret_error import is_peer_failure
from multigpu_cli.faults.rank_position import OwnProgress
from multigpu_cli.faults.rank_status import RankExit, RankExits
from multigpu_cli.faults.stack_lines import describe_innermost_line
from multigpu_cli.runtime.world import World

PATIENCE = 0.5  # seconds for the exits of other ranks, which are published before their connections close


class RootCauseFinder:
    """Publishes how this rank failed, and looks among the exits of all ranks for the first failure.

    Attributes:
        found: the root cause, once it was looked for.
    """

    def __init__(self, world: World, exits: RankExits, progress: OwnProgress) -> None:
        self._world, self._exits, self._progress = world, exits, progress
        self.found: BaseException | None = None

    def find(self, error: BaseException) -> BaseException:
        """The error to raise on this rank for `error`: itself, or that of another rank which caused it."""
        if self.found is None:
            self.found = self._publish_and_find(error)
        return self.found

    def find_for_lost_peer(self, exits: list[RankExit]) -> TrainingError:
        """The error of a rank that only lost its peers; of those that can still report, the lowest does so."""
        progress = self._progress
        error = failure_messages.lost_peer_error(exits, self._world.size, progress.steps_done(), progress.logs)
        error.failed_at = progress.steps_done()
        without_fault = [end.rank for end in exits if end.caused_by_peer]
        error.shared = min([*without_fault, self._world.rank]) != self._world.rank
        if not error.shared:
            self._report(error, exits)
        return error

    def record(self, error: BaseException) -> None:
        """Leave the cause for the next attempt."""
        self.record_text(failure_messages.summary_line(error))

    def record_text(self, text: str) -> None:
        self._exits.record_cause(text, self._progress.steps_done(), self._progress.last_move)

    def _publish_and_find(self, error: BaseException) -> BaseException:
        only_request = isinstance(error, RequestError) and self._world.size == 1
        if only_request or getattr(error, "shared", False) or not isinstance(error, Exception):
            return error
        error.failed_at = self._progress.steps_done()  # type: ignore[attr-defined]
        own = self._describe_exit(error)
        self._exits.publish(own)
        if own.caused_by_peer:
            return self.find_for_lost_peer(self._exits.wait_for_exits(patience=PATIENCE))
        self._report(error, self._exits.wait_for_exits())
        return error

    def _describe_exit(self, error: Exception) -> RankExit:
        known = isinstance(error, TrainingError)
        head = str(error) if known else f"{type(error).__name__}: {error}"
        line = [] if known else [f"in {describe_innermost_line(traceback.extract_tb(error.__traceback__))}"]
        samples = self._progress.samples
        return RankExit(
            rank=self._world.rank,
            place=f"{self._progress.phase}, {self._progress.steps} steps done",
            problem="\n".join([head, *getattr(error, "__notes__", ()), *line]),
            stack="".join(traceback.format_exception(error)),
            caused_by_peer=is_peer_failure(error),
            exit_code=error.exit_code if isinstance(error, TrainingError) else TrainingError.exit_code,
            samples=[] if samples is None else samples.tolist(),
        )

    def _report(self, error: BaseException, exits: list[RankExit]) -> None:
        """Record the error for the next attempt, and write the crash report."""
        self.record(error)
        name = f"crash_{self._world.attempt}.txt"
        with suppress(OSError), self._progress.open_report(name) as file:  # the disk itself may have failed
            file.write(failure_messages.full_report(error, exits))
