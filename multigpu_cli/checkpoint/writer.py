"""Writes checkpoints in a background thread while training continues; at most one job at a time."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self


class Writer:
    """Runs jobs that only read copied state, so that the training loop can continue.

    Attributes:
        waited: seconds that the last `wait_for_staging` took.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._job: Future[None] | None = None
        self._copied: threading.Event | None = None
        self.waited = 0.0

    def submit(self, copy: Callable[[], object], job: Callable[[], None]) -> None:
        """Submit the next job; `wait` must have returned the result of the previous one.

        Args:
            copy: runs first; its source must not change until `wait_for_staging` returns.
        """
        assert self._job is None
        self._copied, self.waited = threading.Event(), 0.0
        self._job = self._pool.submit(self._work, copy, job, self._copied)

    @staticmethod
    def _work(copy: Callable[[], object], job: Callable[[], None], copied: threading.Event) -> None:
        try:
            copy()
        finally:
            copied.set()
        job()

    def wait_for_staging(self) -> None:
        """Wait until the state that is to be written has been copied."""
        if self._copied is None:
            return
        began = time.perf_counter()
        self._copied.wait()
        self._copied, self.waited = None, time.perf_counter() - began

    @property
    def is_done(self) -> bool:
        """Whether a job has finished, so that `wait` returns at once."""
        return self._job is not None and self._job.done()

    def wait(self) -> OSError | None:
        """Wait for the current job, if any; returns its OSError, or None.

        Raises:
            Exception: the job failed with any other error.
        """
        job, self._job = self._job, None
        if job is None:
            return None
        try:
            job.result()
        except OSError as error:  # a full or missing disk: the caller decides whether training continues
            return error
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True)
