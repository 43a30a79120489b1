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
NOTES = ("output", "violations", "opened")


class Outcome(NamedTuple):
    """How a command ended.

    Attributes:
        code: exit code, or minus the signal that ended it.
        text: all that it printed.
        violations: a line for each process that it started and for each file that it wrote outside.
        opened: the files that it opened below a folder, by their names there.
    """

    code: int
    text: str
    violations: str
    opened: frozenset[str] = frozenset()

    def describe_failure(self) -> str:
        """Return what it did that no command may do with a stranger's folder; "" if nothing."""
        problems = [self.violations] if self.violations else []
        if self.code not in (0, 1, 2):
            problems.append("hangs" if self.code == -signal.SIGALRM else f"ends with {self.code}")
        problems += [
            f"prints {mark!r}" for mark in ("Traceback", "internal error", *"\x1b\x07\x00") if mark in self.text
        ]
        return "; ".join(problems)

    def is_clear(self) -> bool:
        """Return whether it did its work or refused it with a message, and did nothing else."""
        return not self.describe_failure()


class ForkedCommand:
    """A command in a fork, in which each start of a process and each write outside `allowed` is noted.

    Args:
        home: folder for its output and notes, whose names are NOTES.
        seconds: a signal ends it after so many.
        prepare: what the fork does first.
        noted: the folder below which each file that it opens is noted.
    """

    def __init__(
        self,
        argv: Sequence[str],
        home: Path,
        allowed: Path,
        *,
        seconds: int = SECONDS,
        prepare: Callable[[], object] = lambda: None,
        noted: Path | None = None,
    ) -> None:
        output, violations, openings = self._files = [home / name for name in NOTES]
        self.pid = os.fork()
        if self.pid:
            self._ended = os.pidfd_open(self.pid)
            return
        try:
            os.setsid()
            with open(output, "wb") as file:
                for number in (1, 2):
                    os.dup2(file.fileno(), number)
            sys.stdout = open(1, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115
            sys.stderr = open(2, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115
            _watch(violations, openings, allowed, noted)
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
        text, violations, opened = (
            file.read_bytes().decode(errors="replace") if file.exists() else "" for file in self._files
        )
        for file in self._files:
            file.unlink(missing_ok=True)
        return Outcome(status, text, violations, frozenset(opened.splitlines()))


def call(argv: Sequence[str], home: Path, allowed: Path, **options: Any) -> Outcome:
    """Run a command in a fork to its end."""
    return ForkedCommand(argv, home, allowed, **options).wait()


def _show_warning(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
    """Print a warning as the front door does, where pytest would only keep it."""
    print(main_multi_gpu.format_warning(message, category, filename, lineno, line), end="", file=sys.stderr)


def _watch(notes: Path, openings: Path, allowed: Path, noted: Path | None) -> None:
    """Note what this process, which ends soon, opens, and what it does that no command may do."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    log, opened = os.open(notes, flags), os.open(openings, flags)
    unnamed = tempfile.gettempdir()  # an unnamed temporary file is opened by the name of its folder
    temporary = (
        *(f"{unnamed}/{prefix}" for prefix in ("multigpu-", "tmp", "pymp-")),
        f"{os.environ['HF_HOME']}/multigpu",
    )
    starts = {"subprocess.Popen", "os.exec", "os.posix_spawn", "os.system", "pty.spawn"}
    changes = {
        **dict.fromkeys(("os.remove", "os.rmdir", "os.truncate", "os.chmod", "os.mkdir", "os.chown", "os.utime"), (0,)),
        "os.rename": (0, 1),
        "os.link": (0, 1),
        "os.symlink": (1,),
    }
    follow = {"open", "os.truncate", "os.chmod", "os.chown", "os.utime"}
    below = f"{noted}/"  # None/ is below no folder that has a whole path

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in starts:
            os.write(log, f"{event} {arguments[:2]!r}\n".encode())
        paths = [arguments[number] for number in changes.get(event, ())]
        if event == "open" and isinstance(arguments[0], str) and arguments[0].startswith(below):
            os.write(opened, arguments[0].removeprefix(below).encode(errors="replace") + b"\n")
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            paths = [arguments[0]]
        inside = event in ("os.remove", "os.rmdir") and arguments[1] != -1  # by the descriptor of a folder
        base = Path(f"/proc/self/fd/{arguments[1]}").readlink() if inside else Path.cwd()
        for path in paths:
            if isinstance(path, str | bytes | os.PathLike):
                place = base / os.fsdecode(path)
                # names are removed, renamed or made where they are, and the others follow a link
                named = Path(os.path.realpath(place.parent), place.name)
                real = os.path.realpath(place) if event in follow else str(named)
                elsewhere = real != unnamed and not real.startswith((*temporary, "/dev/"))
                if elsewhere and not Path(real).is_relative_to(allowed):
                    os.write(log, f"{event} {real!r}\n".encode(errors="replace"))

    sys.addaudithook(hook)
