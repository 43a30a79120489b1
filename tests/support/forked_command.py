"""Commands of the front door in forks: how they end, what they print, and what they do that no command may."""

import os
import select
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.font_manager  # noqa: F401  - it looks for fonts by a process of its own, once

import main_multi_gpu
from tests.support import safe_forks  # noqa: F401

SECONDS = 120  # of a command, on a busy machine


class Outcome(NamedTuple):
    """How a command ended.

    Attributes:
        code: exit code, or minus the signal that ended it.
        text: all that it printed.
        violations: a line for each process that it started and for each file that it wrote outside.
    """

    code: int
    text: str
    violations: str

    def is_clear(self) -> bool:
        """Return whether it did its work or refused it with a message, and did nothing else."""
        never = ("Traceback", "internal error", "\x1b", "\x07", "\x00")
        return self.code in (0, 1, 2) and not self.violations and not any(each in self.text for each in never)


class ForkedCommand:
    """A command in a fork, in which each start of a process and each write outside `allowed` is noted.

    Args:
        home: folder for its output and notes.
        seconds: a signal ends it after so many.
        prepare: what the fork does first.
    """

    def __init__(
        self,
        argv: Sequence[str],
        home: Path,
        allowed: Path,
        *,
        seconds: int = SECONDS,
        prepare: Callable[[], object] = lambda: None,
    ) -> None:
        self._output, self._notes = home / "output", home / "notes"
        self.pid = os.fork()
        if self.pid:
            self._ended = os.pidfd_open(self.pid)
            return
        try:
            os.setsid()
            with open(self._output, "wb") as file:
                for number in (1, 2):
                    os.dup2(file.fileno(), number)
            sys.stdout = open(1, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115
            sys.stderr = open(2, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115
            _watch(self._notes, allowed)
            warnings.resetwarnings()  # pytest makes errors of them
            warnings.showwarning = _show_warning
            signal.alarm(seconds)
            prepare()
            code = main_multi_gpu.run(argv)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        finally:
            os._exit(99)

    def is_over(self) -> bool:
        return bool(select.select([self._ended], [], [], 0)[0])

    def wait(self) -> Outcome:
        """Wait for its end."""
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self._ended)
        texts = [file.read_bytes().decode(errors="replace") for file in (self._output, self._notes) if file.exists()]
        return Outcome(status, *[*texts, "", ""][:2])


def call(argv: Sequence[str], home: Path, allowed: Path, **options: Any) -> Outcome:
    """Run a command in a fork to its end."""
    return ForkedCommand(argv, home, allowed, **options).wait()


def _show_warning(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
    """Print a warning as the front door does, where pytest would only keep it."""
    print(main_multi_gpu.format_warning(message, category, filename, lineno, line), end="", file=sys.stderr)


def _watch(notes: Path, allowed: Path) -> None:
    """Note what this process, which ends soon, does that no command may do with a stranger's folder."""
    log = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    temporary = tuple(f"{tempfile.gettempdir()}/{prefix}" for prefix in ("multigpu-", "tmp", "pymp-"))
    starts = {"subprocess.Popen", "os.exec", "os.posix_spawn", "os.system", "pty.spawn"}
    changes = {"os.remove": (0,), "os.rename": (0, 1), "os.rmdir": (0,), "os.truncate": (0,), "os.chmod": (0,)}

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in starts:
            os.write(log, f"{event} {arguments[:2]!r}\n".encode())
        paths = [arguments[number] for number in changes.get(event, ())]
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            paths = [arguments[0]]
        inside = event in ("os.remove", "os.rmdir") and arguments[1] != -1  # by the descriptor of a folder
        base = Path(f"/proc/self/fd/{arguments[1]}").readlink() if inside else Path.cwd()
        for path in paths:
            if isinstance(path, str | bytes | os.PathLike):
                real = os.path.realpath(base / os.fsdecode(path))
                if not Path(real).is_relative_to(allowed) and not real.startswith((*temporary, "/dev/")):
                    os.write(log, f"{event} {real!r}\n".encode(errors="replace"))

    sys.addaudithook(hook)
