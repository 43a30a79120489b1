"""How processes end and speak together: with their parent, beside rank 0, before a script's main, on the screen.

A process beside rank 0 that follows the run folder is in a session of its own: no terminal, no torchrun and no signal
to the run ends it. A byte on its stdin means that the run has ended; the loss of its parent, that rank 0 died. What it
writes to rank 0 is read without waiting. No torch.
"""

import ast
import ctypes
import io
import os
import platform
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from logging import getLogger
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FrameType, FunctionType
from typing import IO, Any, TextIO

from multigpu_cli.config.regular_files import open_regular, without_links
from multigpu_cli.distributed.launch_env import LaunchEnv
from multigpu_cli.errors import RequestError, make_printable

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int | None = None, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends (Linux); exit at once if it has ended already.

    Without the parent's pid, a parent that ended before this call is not noticed.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid() if parent is None else parent
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


_ROOT = Path(__file__).resolve().parents[2]
_START = (
    "import sys; from importlib import import_module; sys.path.insert(0, sys.argv.pop(1)); "
    "import_module(sys.argv.pop(1)).main(sys.argv[1:])"
)
_NICE = 10  # less of a busy machine's time than a training gets


def python_command(*words: str) -> list[str]:
    """Return the command that starts this Python; no other place starts one.

    With -c and -m, Python would import modules of the working directory before its own, and a stranger's json.py there
    would run. A script's own folder, which is this program's, comes first instead.
    """
    return [sys.executable, *(["-P"] if words[0] in ("-c", "-m") else []), *words]


class Companion:
    """The process, seen from rank 0; nothing here waits for it. OSError: the machine can't start one.

    The module's `main(arguments)` calls `serve` first. The working directory stays that of the run, and no module is
    searched there. `hear` gets each line that it writes, from `relay`; `errors` gets stderr and what libraries print.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        hear: Callable[[str], None],
        errors: int | IO[bytes] = subprocess.DEVNULL,
    ) -> None:
        command = python_command("-c", _START, str(_ROOT), module, *arguments)
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, start_new_session=True)
        assert self.process.stdin
        assert self.process.stdout
        self._pipe, self._notes, self._unread, self._hear = self.process.stdin, self.process.stdout, b"", hear
        os.set_blocking(self._notes.fileno(), False)

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def relay(self) -> None:
        """Hear the lines that it has written since the last call."""
        if not self._notes.closed:
            with suppress(BlockingIOError):
                self._unread += os.read(self._notes.fileno(), 65536)
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            self._hear(line.decode(errors="replace"))

    def end(self, waits: Callable[[], bool], *, kill: bool = False) -> None:
        """The run has ended: the process sends the rest, and ends; wait for that, asking `waits` again and again.

        If it is still at work then it is killed, or goes on alone, for as long as it gives itself.
        """
        with suppress(BrokenPipeError):  # it is gone already
            self._pipe.write(b"\n")  # closing alone is not seen while a loader process, a fork, holds the pipe too
            self._pipe.close()
        try:
            while self.running and waits():
                self.relay()
                time.sleep(0.05)
        finally:
            self.relay()
            self._notes.close()
            if self.running and kill:
                with suppress(ProcessLookupError):  # it has just ended
                    os.killpg(self.process.pid, signal.SIGKILL)
            threading.Thread(target=self.process.wait, name="companion's end", daemon=True).start()


def serve() -> tuple[threading.Event, Callable[[str], None]]:
    """Become a companion: no signal ends this process, and it yields to the training.

    Returns an event that is set when the run has ended or rank 0 is gone, and what writes a line to rank 0.
    """
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        # a job's manager may signal all processes; the run's end decides. SIG_IGN would be a library's processes' too
        signal.signal(each, lambda *_: None)
    os.nice(_NICE)
    pipe, notes, null, parent = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDWR), os.getppid()
    os.dup2(null, 0)
    os.dup2(2, 1)  # a library may print
    os.set_blocking(notes, False)
    ended = threading.Event()

    def note(text: str) -> None:
        with suppress(OSError):  # a reader that is gone, or does not read
            os.write(notes, (" ".join(text.splitlines()) + "\n").encode())

    def wait_for_end() -> None:
        """Something is in the pipe, its other end is closed, or this process has lost its parent."""
        while os.getppid() == parent and not select.select([pipe], [], [], 1.0)[0]:
            pass
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    return ended, note


_GUARDS = {"__name__", "current_process", "parent_process"}  # names in a test that is false in a spawned process


def check_spawned_script(*objects: Any) -> None:
    """Refuse a script that would start processes again in each process, and objects that they could not import.

    RequestError: the script starts processes outside of `if __name__ == "__main__":`, or it comes from stdin, `python
    -c` or a notebook and defines a class or function of the objects. Exception: pickling an object failed.
    """
    frame, file = _find_script_frame(), getattr(sys.modules["__main__"], "__file__", None)
    if frame and (script := Path(frame.f_globals["__file__"])).exists():
        _check_guard(script, frame.f_lineno)
        return
    pickler = _NamePickler(io.BytesIO())
    if not file:
        pickler.dump(objects)
    if pickler.found or file == "<stdin>":
        raise RequestError(
            f"{pickler.found or 'the script'} comes from stdin, python -c or a notebook: worker processes can't import "
            "it",
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
        if isinstance(node, ast.If) and node.lineno <= line <= (node.end_lineno or line):
            names = {getattr(inner, "id", getattr(inner, "attr", None)) for inner in ast.walk(node.test)}
            if names & _GUARDS:
                return
    raise RequestError(
        f"{script.name}, line {line}: this starts processes, each of which imports the script and would start them "
        "again",
        remedy="move the training code into a function, `def main():`, and end the script with\n"
        '    if __name__ == "__main__":\n'
        "        main()",
    )


class _NamePickler(ForkingPickler):
    """Finds the first class or function of `__main__` that a pickle refers to."""

    found = ""

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, type | FunctionType) and thing.__module__ == "__main__":
            self.found = self.found or thing.__qualname__
        return NotImplemented


_HEAD = "--- rank "  # each attempt's first line
_TAIL = 8192  # bytes


class RankOutput(AbstractContextManager["RankOutput"]):
    """Redirects this process's stdout and stderr to a file, for Python and C libraries.

    On leaving the context both are restored, so that an error is printed to the terminal.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._before: tuple[tuple[int, int], TextIO, TextIO] | None = None

    def start(self, logs: Path, attempt: int) -> None:
        """Append output to this rank's file from now on; if the file can't be opened, output is not redirected.

        If the path is a link or a FIFO, it is neither followed nor waited for.
        """
        if self._before is not None:
            return
        _flush()
        with suppress(OSError):  # the folder of a run may lie on another machine
            file = without_links(str(log_path(logs, self._rank)), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            originals = os.dup(1), os.dup(2)
            here = f"{platform.node()}, process {os.getpid()}"
            head = f"{_HEAD}{self._rank}, attempt {attempt + 1}, {time.strftime('%Y-%m-%d %H:%M:%S')}, {here}\n"
            os.write(file, head.encode())
            self._before = originals, sys.stdout, sys.stderr
            for number in (1, 2):
                os.dup2(file, number)
            os.close(file)
            sys.stdout, sys.stderr = _stream(1, originals[0]), _stream(2, originals[1])

    def stop(self) -> None:
        """Restore the original stdout and stderr."""
        if self._before is None:
            return
        _flush()
        originals, sys.stdout, sys.stderr = self._before
        self._before = None
        _flush()  # other code may have kept and used the original streams
        for number, before in enumerate(originals, 1):
            os.dup2(before, number)
            os.close(before)

    def __exit__(self, *_: object) -> None:
        self.stop()


def log_path(logs: Path, rank: int) -> Path:
    return logs / f"rank_{rank}.log"


def read_last_lines(logs: Path, rank: int, lines: int = 4) -> list[str]:
    """The last lines that a rank printed in its last attempt; empty if its file is not on this machine, or is none."""
    try:
        with open_regular(log_path(logs, rank)) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            text = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    heads = [at for at, line in enumerate(text) if line.startswith(_HEAD)]
    return text[max(heads[-1] + 1 if heads else 0, len(text) - lines) :]


def quote_last_lines(logs: Path | None, rank: int) -> str:
    """The last lines of a rank for a message, after a line that names the file; "" if there are none."""
    if not logs or not (lines := read_last_lines(logs, rank)):
        return ""
    return "".join(f"\n  {line}" for line in [f"its last output ({log_path(logs, rank)}):", *lines])


def find_ranks_with_output(logs: Path, size: int) -> list[int]:
    """The ranks whose last attempt has written output into its file on this machine."""
    return [rank for rank in range(size) if read_last_lines(logs, rank)]


def say_before_run(text: str) -> None:
    """Print a text to stderr from the first process of a node, before there is a run whose console could do so."""
    launch_env = LaunchEnv.current()
    if launch_env is None or launch_env.local_rank == 0:
        getLogger(__name__).warning("%s", make_printable(text))


class _Raw(io.RawIOBase):
    """A file descriptor; if a write fails, for instance on a full disk, the bytes go to the terminal instead."""

    def __init__(self, number: int, otherwise: int) -> None:
        self._number, self._otherwise = number, otherwise

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def write(self, data: object) -> int:
        try:
            return os.write(self._number, data)  # type: ignore[arg-type]
        except OSError:
            return os.write(self._otherwise, data)  # type: ignore[arg-type]


def _stream(number: int, otherwise: int) -> TextIO:
    buffer = io.BufferedWriter(_Raw(number, otherwise))
    return io.TextIOWrapper(buffer, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _flush() -> None:
    """Flush the streams of Python and of C."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or a pipe without a reader
            stream.flush()
    ctypes.CDLL(None).fflush(None)
