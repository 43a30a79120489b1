"""A client of the launcher's store whose calls time out, also on a host that has lost its network."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

import torch.distributed as dist

Answer = TypeVar("Answer")

_TIMEOUT = 5.0  # seconds for an answer


class DeadlineStore:
    """A store whose calls return or raise within a few seconds.

    torch's `check` waits for as long as the connection seems open, which is up to 15 minutes without a network.
    So each call runs in a thread of its own; while one is overdue, no other is started.

    Raises:
        RuntimeError: the store is gone or does not answer, as torch's own stores do.
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
            except BaseException as error:  # raised again where the answer is read
                answer.set_exception(error)

        asking = Thread(target=ask, name="question", daemon=True)
        asking.start()
        asking.join(_TIMEOUT)  # its end, not its answer: Python's exit aborts a thread that it finds in torch's code
        if asking.is_alive():
            self._asking = asking
            raise RuntimeError("the store does not answer")
        return answer.result()
