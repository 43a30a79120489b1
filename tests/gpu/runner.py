"""Runs one check after the other, each in a process of its own with a time limit, for as long as a call may take."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tests.gpu.machine import ROOT, patience
from tests.gpu.registry import CHECKS, Check
from tests.gpu.results import FAILED, SKIPPED, UNVERIFIED, Line, Results

_USUAL = 60.0  # seconds that must be left for a check to begin
_GRACE = 10.0  # seconds from SIGTERM to SIGKILL
_SHOWN = 2000  # characters of what a failed check printed


class Ended(NamedTuple):
    """How a check's process ended.

    Attributes:
        answer: what it wrote down at its end; {} where it did not come to that.
        problem: why there is no answer.
    """

    answer: dict[str, Any]
    problem: str
    seconds: float


def about() -> Line:
    """The machine, asked by another process: one that has touched a GPU holds memory of it."""
    words = [sys.executable, "-m", "tests.gpu.check", "--about"]
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def run_all(
    names: Sequence[str], results: Results, budget: float, *, simulated: bool, devices: int = 1
) -> Iterator[Line]:
    """Carry out checks until the time is over, and hand on each result as it comes.

    A check that the end of the call cuts off has no result, and is carried out again at the next; the first of a call
    has all of its time.

    Args:
        budget: seconds for all of them.
    """
    until = time.monotonic() + budget
    for number, name in enumerate(names):
        if CHECKS[name].needs > devices:
            yield results.add(name, SKIPPED, f"{CHECKS[name].needs} GPUs are needed, and {devices} here", 0.0, {})
            continue
        if CHECKS[name].real and simulated:
            yield results.add(name, UNVERIFIED, "simulated: this needs a real GPU", 0.0, {})
            continue
        left = until - time.monotonic()
        if number and left < min(_USUAL, CHECKS[name].limit):
            return
        limit = patience(CHECKS[name].limit)
        ended = run_one(CHECKS[name], min(limit, left) if number else limit)
        if ended.problem and number and time.monotonic() >= until:
            return
        answer = ended.answer or {"verdict": FAILED, "said": ended.problem, "facts": {}}
        yield results.add(name, answer["verdict"], answer["said"], ended.seconds, answer["facts"])


def run_one(check: Check, limit: float) -> Ended:
    """Carry out one check in a process of its own, and end all that it started."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as folder:
        told, log = Path(folder, "told.json"), Path(folder, "log.txt")
        words = [sys.executable, "-m", "tests.gpu.check", "--child", check.function, str(told)]
        with open(log, "wb") as output:
            process = subprocess.Popen(words, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
        try:
            code = process.wait(limit)
            problem = f"ended with {code} before it said anything"
        except subprocess.TimeoutExpired:
            problem = f"not done after {limit:.0f} s"
        finally:
            _end_group(process)
        answer = json.loads(told.read_text()) if told.exists() else {}
        printed = log.read_text(errors="replace")[-_SHOWN:]
    return Ended(answer, "" if answer else f"{problem}\n{printed}", time.monotonic() - began)


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """End a check and whatever of it is still there: gently first, so that a run's own workers end too."""
    with suppress(ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
