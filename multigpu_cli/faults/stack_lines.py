"""Picks the lines of a stack that matter to the user: those outside of Python and installed packages."""

import os
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path


def is_library_file(file: str) -> bool:
    """Whether a source file belongs to Python itself or to an installed package."""
    return "site-packages" in file or file.startswith((str(Path(os.__file__).parent), "<frozen"))


def describe_innermost_line(stack: Sequence[traceback.FrameSummary]) -> str:
    """File, line and function of the innermost frame outside of libraries; "" if there is none."""
    own = [frame for frame in stack if not is_library_file(frame.filename)]
    return f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""


def describe_main_thread_line() -> str:
    """The same for what the main thread executes right now."""
    return describe_innermost_line(_extract_main_thread_stack())


def format_main_thread_stack() -> str:
    """What the main thread executes right now, in the words of a traceback."""
    return "".join(["Stack of the main thread:\n", *_extract_main_thread_stack().format()])


def _extract_main_thread_stack() -> traceback.StackSummary:
    return traceback.extract_stack(sys._current_frames()[threading.main_thread().ident or 0])
