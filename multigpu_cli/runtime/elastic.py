"""What passes between torchrun's agent and us besides ranks: error files, and verdicts that outlive an attempt."""

import json
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Verdict(NamedTuple):
    """How an attempt ended that must not be repeated."""

    code: int
    message: str


def write_error(environ: Mapping[str, str], message: str, callstack: str = "") -> None:
    """Leave our message where torchrun's final box looks for it (FIELD: its format is that of torch's ErrorHandler)."""
    if not (file := environ.get("TORCHELASTIC_ERROR_FILE")):
        return
    extra = {"py_callstack": callstack or message, "timestamp": str(int(time.time()))}
    with suppress(OSError):  # the message was printed already; the box is a courtesy
        Path(file).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))


def remember(environ: Mapping[str, str], verdict: Verdict) -> None:
    """Let the attempts that this agent may still start know that there is nothing to repeat.

    The agent restarts its workers after any exit code but 0, also after a wrong request or a stop.
    """
    if environ.get("LOCAL_RANK", "0") != "0" or _attempt(environ) >= int(environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
        return
    with suppress(FileExistsError):
        descriptor = os.open(_marker(environ), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(verdict._asdict(), file)


def earlier_verdict(environ: Mapping[str, str]) -> Verdict | None:
    """How an earlier attempt under the same agent ended, if that was for good."""
    if _attempt(environ) == 0:
        return None
    try:
        descriptor = os.open(_marker(environ), os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    with os.fdopen(descriptor) as file:
        if os.fstat(file.fileno()).st_uid != os.getuid():
            return None
        return Verdict(**json.load(file))


def _attempt(environ: Mapping[str, str]) -> int:
    return int(environ.get("TORCHELASTIC_RESTART_COUNT", 0)) if "TORCHELASTIC_RUN_ID" in environ else 0


def _marker(environ: Mapping[str, str]) -> Path:
    """One name for each agent process: run ids repeat ("none"), process numbers are used again, but not both."""
    agent = os.getppid()
    run = "".join(letter if letter.isalnum() else "-" for letter in environ.get("TORCHELASTIC_RUN_ID", ""))[:60]
    return Path(tempfile.gettempdir()) / f"multigpu-{os.getuid()}-{run}-{agent}-{_started(agent)}"


def _started(process: int) -> str:
    """When a process began, in clock ticks since boot; empty where the system does not say (no /proc)."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
