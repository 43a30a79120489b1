"""Checks before processes are spawned that they can import the user's script, which multiprocessing runs in each."""

import ast
import io
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

from multigpu_cli.errors import RequestError

_GUARDS = {"__name__", "current_process", "parent_process"}  # names in a test that is false in a spawned process


def check_spawned_script(*objects: Any) -> None:
    """Refuse a script that would start processes again in each process, and objects that they could not import.

    Args:
        objects: the objects that are sent to the processes.

    Raises:
        RequestError: the script starts processes outside of `if __name__ == "__main__":`, or it comes from stdin,
            `python -c` or a notebook and defines a class or function of the objects.
        Exception: pickling an object failed.
    """
    frame, file = _find_script_frame(), getattr(sys.modules["__main__"], "__file__", None)
    if frame and (script := Path(frame.f_globals["__file__"])).exists():
        _check_guard(script, frame.f_lineno)
        return
    name = "" if file else _find_name_in_main(objects)
    if name or file == "<stdin>":
        raise RequestError(
            f"{name or 'the script'} comes from stdin, python -c or a notebook: worker processes can't import it",
            remedy="put it into a .py file, or train in one process with world_size=1",
        )


def _find_script_frame() -> FrameType | None:
    """The frame of the script's top level, if it is on the stack and the script is a file."""
    frame: FrameType | None = sys._getframe()
    while frame and not (frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__"):
        frame = frame.f_back
    return frame if frame and frame.f_globals.get("__file__") else None


def _check_guard(script: Path, line: int) -> None:
    for node in ast.walk(ast.parse(script.read_bytes())):
        if isinstance(node, ast.If) and node.lineno <= line <= (node.end_lineno or line) and _is_guard(node.test):
            return
    raise RequestError(
        f"{script.name}, line {line}: this starts processes, each of which imports the script and would start them "
        "again",
        remedy="move the training code into a function, `def main():`, and end the script with\n"
        '    if __name__ == "__main__":\n'
        "        main()",
    )


def _is_guard(test: ast.expr) -> bool:
    return any(getattr(node, "id", getattr(node, "attr", None)) in _GUARDS for node in ast.walk(test))


def _find_name_in_main(objects: Any) -> str:
    """The first class or function of `__main__` that a pickle of these objects refers to; "" if there is none."""
    pickler = _NamePickler(io.BytesIO())
    pickler.dump(objects)
    return pickler.found


class _NamePickler(ForkingPickler):
    found = ""

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, type | FunctionType) and thing.__module__ == "__main__":
            self.found = self.found or thing.__qualname__
        return NotImplemented
