"""Runs tests in forks of itself: what takes seconds to import is imported once, and what is tested anew each time.

It is started in a copy of the tree and told, one line of JSON each, which tests to run; it answers with a line when
they are done and whatever they started is gone.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.mutants.tracing import follow, note_in

_HEAVY = ("torch._dynamo", "torch.utils.tensorboard", "torch.distributed", "sklearn.datasets", "hypothesis", "typer")
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)
_COLLECTION_SECONDS = 120
_TEST_SECONDS = 600


class Watched:
    """A plugin of pytest: the chosen tests alone, the short ones first, each within its time.

    Attributes:
        done: seconds by test: those of processors, and those on the clock.
        failed: the tests that did not pass.
    """

    def __init__(self, limits: dict[str, float], first: list[str], *, traced: bool) -> None:
        self._limits, self._first, self._traced = limits, first, traced
        self.done: dict[str, tuple[float, float]] = {}
        self.failed: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if self._limits:
            items[:] = [item for item in items if item.nodeid in self._limits]
            items.sort(key=lambda item: item.nodeid not in self._first)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        seconds = self._limits.get(item.nodeid, _TEST_SECONDS)
        signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM, which nobody handles, ends the fork
        before = os.times()
        result = yield
        after = os.times()
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.done[item.nodeid] = (round(sum(after[:4]) - sum(before[:4]), 2), round(after[4] - before[4], 2))
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Any:
        if self._traced:
            follow(item.nodeid.partition("::")[0])  # a module's fixture serves all its tests
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        if self._traced:
            follow(item.nodeid)
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def _run(asked: dict[str, Any]) -> None:
    """In the fork: the tests, and a file that says how they went."""
    os.setsid()
    log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, _COLLECTION_SECONDS)
    if "traced" in asked:
        note_in(asked["traced"])
    watched = Watched(asked["limits"], asked["first"], traced="traced" in asked)
    words = ["-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", "--basetemp", asked["scratch"]]
    words += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # hypothesis is imported already
    ended = pytest.main([*words, *asked["words"], *asked["files"]], plugins=[watched])
    told = {"code": int(ended), "failed": watched.failed, "done": watched.done}
    Path(asked["told"]).write_text(json.dumps(told), encoding="utf-8")


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Fork, wait, and end whatever is left of it; `signal` in place of `code` for one that a signal ended."""
    Path(asked["told"]).unlink(missing_ok=True)
    process = os.fork()
    if process == 0:
        try:
            _run(asked)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)  # as in tests/support/fork.py
    _, status, used = os.wait4(process, 0)
    _end_all()
    told, found = Path(asked["told"]), {"signal": os.WTERMSIG(status), "failed": []}
    if told.exists():
        found = json.loads(told.read_text(encoding="utf-8"))
    return found | {"cpu": used.ru_utime + used.ru_stime}


def _end_all() -> None:
    """Kill what the tests left: orphans become our children, so sooner or later all of them are."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while children.exists() and (left := children.read_text().split()):
        for child in left:
            with suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(int(child), 0)


def _leave(number: int, _: FrameType | None) -> None:
    _end_all()
    os._exit(128 + number)


def main() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, _leave)
    for name in _HEAVY:
        importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
