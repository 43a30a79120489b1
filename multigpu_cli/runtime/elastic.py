"""What passes between torchrun's agent and us besides ranks: error files, and what attempts know of earlier ones."""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from multigpu_cli.errors import FAILED


class Verdict(NamedTuple):
    """How an attempt ended that must not be repeated."""

    code: int
    message: str


def write_error(environ: Mapping[str, str], message: str, callstack: str = "") -> None:
    """Leave our message where torchrun's final box looks for it (FIELD: its format is that of torch's ErrorHandler)."""
    if not (file := environ.get("TORCHELASTIC_ERROR_FILE")):
        return
    extra = {"py_callstack": callstack or message, "timestamp": str(int(time.time()))}
    draft = Path(f"{file}.draft")
    with suppress(OSError):  # the message was printed already; the box is a courtesy
        draft.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
        draft.replace(file)  # the agent may read it at any moment


def redirected(environ: Mapping[str, str]) -> bool:
    """Whether torchrun was asked for log files of its own (--redirects, --tee): they lie beside the error files."""
    file = Path(environ.get("TORCHELASTIC_ERROR_FILE", ""))
    return any(file.with_name(name).exists() for name in ("stdout.log", "stderr.log")) if file.name else False


def remember(environ: Mapping[str, str], verdict: Verdict) -> None:
    """Let the attempts that this agent may still start know that there is nothing to repeat.

    The agent restarts its workers after any exit code but 0, also after a wrong request or a stop.
    """
    if _attempt(environ) < int(environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
        _write(_folder(environ), "verdict", verdict._asdict())


def earlier_verdict(environ: Mapping[str, str]) -> Verdict | None:
    """How an earlier attempt under the same agent ended, if that was for good."""
    found = _read(_folder(environ), "verdict") if _attempt(environ) else None
    return None if found is None else Verdict(**found)


def note_failure(environ: Mapping[str, str], message: str, step: int | None) -> str:
    """Remember a failure: one before the first step, or the same at the same step twice, is not worth another attempt.

    Args:
        step: optimizer steps done, None before the first of this attempt.

    Returns:
        A line that says so where attempts are left that won't be made, else "".
    """
    folder, attempt = _folder(environ), _attempt(environ)
    failure = {"message": message, "step": step}
    before = any(_read(folder, f"failure-{earlier}") == failure for earlier in range(attempt))
    if step is not None and not before:
        _write(folder, f"failure-{attempt}", failure)
        return ""
    remember(environ, Verdict(FAILED, message))
    if attempt >= int(environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
        return ""
    why = "a failure before the first step" if step is None else f"the same failure at step {step} again"
    return f"  no restart: {why} would only repeat itself"


def _attempt(environ: Mapping[str, str]) -> int:
    return int(environ.get("TORCHELASTIC_RESTART_COUNT", 0)) if "TORCHELASTIC_RUN_ID" in environ else 0


def _folder(environ: Mapping[str, str]) -> Path | None:
    """The agent's own folder, which all its attempts share: RUN/attempt_0/RANK/error.json lies in it."""
    file = environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(file).parents[2] if file else None


def _write(folder: Path | None, name: str, content: Mapping[str, Any]) -> None:
    """The first word counts; every rank may say it."""
    if folder is None:
        return
    with suppress(FileExistsError), open(folder / f"multigpu-{name}.json", "x") as file:
        json.dump(content, file)


def _read(folder: Path | None, name: str) -> dict[str, Any] | None:
    if folder is None:
        return None
    try:
        return dict(json.loads((folder / f"multigpu-{name}.json").read_text()))
    except (FileNotFoundError, ValueError):  # another rank of this node may be writing it
        return None
