"""Writes checkpoints in a background thread while training continues; at most one job in flight."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self


class Writer:
    """Takes over jobs that only read what was copied for them; the loop goes on meanwhile."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._job: Future[None] | None = None
        self._copied: threading.Event | None = None
        self.waited = 0.0

    def submit(self, copy: Callable[[], object], job: Callable[[], None]) -> None:
        """Hand over the next job, once the one before has been settled.

        Args:
            copy: comes first, and must be over before what it copies may change: see `wait_for_staging`.
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
        """Wait until what is to be written has been copied; `waited` says for how many seconds."""
        if self._copied is None:
            return
        began = time.perf_counter()
        self._copied.wait()
        self._copied, self.waited = None, time.perf_counter() - began

    @property
    def is_done(self) -> bool:
        """Whether a job waits to be settled, and that will not take time."""
        return self._job is not None and self._job.done()

    def wait(self) -> OSError | None:
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

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True)
