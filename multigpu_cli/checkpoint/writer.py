"""Writes checkpoints beside the training: one background thread, at most one job in flight."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self


class Writer:
    """Takes over jobs that only read what was copied for them; the loop goes on meanwhile."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._job: Future[None] | None = None

    def submit(self, job: Callable[[], None]) -> OSError | None:
        """Hand over the next job; waits for the one before, and returns what went wrong with it, if anything."""
        error = self.settle()
        self._job = self._pool.submit(job)
        return error

    def settle(self) -> OSError | None:
        """Wait until nothing is in flight; the file system's complaint about the last job, or None.

        Raises:
            Exception: the job failed for another reason than the file system.
        """
        job, self._job = self._job, None
        if job is None:
            return None
        try:
            job.result()
        except OSError as error:  # a full or vanished disk: whoever asked decides whether training goes on
            return error
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True)
