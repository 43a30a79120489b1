"""The launcher's store as the watchdog asks it: a host that is cut off gets no answer, and must not wait for one."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

import torch.distributed as dist

Answer = TypeVar("Answer")

_LONGEST = 5.0  # seconds for an answer


class DeadlineStore:
    """A store whose every verb ends in time.

    torch's `check` waits for as long as the connection seems open: a quarter of an hour, if nobody answers at all.
    So each question has a thread of its own; while one is open for too long, no other is asked.

    Raises:
        RuntimeError: the store has gone, or does not answer; as torch's own stores do.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._asking: Thread | None = None

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        return self._ask(lambda: bytes(self._store.get(key)))

    def add(self, key: str, amount: int) -> int:
        return self._ask(lambda: int(self._store.add(key, amount)))

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(lambda: bool(self._store.check(list(keys))))

    def _ask(self, question: Callable[[], Answer]) -> Answer:
        if self._asking and self._asking.is_alive():
            raise RuntimeError("the store does not answer")
        answer: Future[Answer] = Future()

        def ask() -> None:
            try:
                answer.set_result(question())
            except BaseException as error:  # it is raised where the answer is waited for
                answer.set_exception(error)

        asking = Thread(target=ask, name="question", daemon=True)
        asking.start()
        try:
            return answer.result(_LONGEST)
        except TimeoutError as error:
            self._asking = asking
            raise RuntimeError("the store does not answer") from error
