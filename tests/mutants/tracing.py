"""Notes which lines of the mutated rooms each test runs: in its forks and threads too, and in processes that it starts.

Lines go to a file at once, each once a process: a rank that ends by `os._exit` or a kill has told all the same.
"""

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("engine.py", "run", "strategies", "checkpoint", "planning", "hooks", "freezing.py", "metrics", "mirror")
SITE = """import os
if "MUTANTS_TRACED" in os.environ:
    from tests.mutants.tracing import note_in
    note_in(os.environ["MUTANTS_TRACED"])
"""
"""A `sitecustomize.py` that makes each Python process with it on its path note its lines."""

_PATHS = tuple(f"{ROOT}/multigpu_cli/{room}" for room in ROOMS)

_seen: set[tuple[CodeType, int]] = set()
_ours: dict[CodeType, bool] = {}
_to: list[int] = []


def note_in(path: str) -> None:
    """Note from here on into this file, also in processes that are started."""
    os.environ["MUTANTS_TRACED"] = path
    _to[:] = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)]
    threading.settrace(_trace_call)
    sys.settrace(_trace_call)


def follow(test: str) -> None:
    """What runs now belongs to this test."""
    os.environ["MUTANTS_TEST"] = test
    _seen.clear()
    sys.settrace(_trace_call)  # a test may have ended it


def _trace_call(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
    code = frame.f_code
    if code not in _ours:
        _ours[code] = code.co_filename.startswith(_PATHS)
    if not _ours[code]:
        return None
    _note(code, code.co_firstlineno)
    return _trace_line


def _trace_line(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
    if event == "line":
        _note(frame.f_code, frame.f_lineno)
    return _trace_line


def _note(code: CodeType, line: int) -> None:
    if (code, line) not in _seen:
        _seen.add((code, line))
        test = os.environ.get("MUTANTS_TEST", "")
        os.write(_to[0], f"{test}\t{code.co_filename.removeprefix(f'{ROOT}/')}\t{line}\n".encode())
