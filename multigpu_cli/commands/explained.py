"""Errors in words: what a user reads on stderr."""

import sysconfig
import traceback
from pathlib import Path
from typing import Any

from multigpu_cli.errors import TrainingError
from multigpu_cli.faults.causes import remedy_for

_LONGEST = 15  # lines


def usage(error: Any) -> str:
    """Typer's own complaint in our words."""
    message = (error.message or error.format_message()).rstrip(".")  # a missing argument has only the second
    remedy = ", ".join(sorted(getattr(error, "possibilities", None) or ())) or "--help lists all options"
    if getattr(error, "option_name", None) == "--local-rank":
        remedy = "torchrun in the place of torch.distributed.launch, which adds it"
    return f"error: {message[:1].lower()}{message[1:]}\n  try: {remedy}"


def foreseen(error: TrainingError) -> str:
    """An error that has a name: problem and remedy; several broken rules stand one after the other."""
    message = str(error)
    return "\n".join(line if line.startswith(" ") else f"error: {line}" for line in message.splitlines())


def unexpected(error: Exception) -> str:
    """Type, message and the lines of code that matter: the user's own, or else ours."""
    here = str(Path(__file__).resolve().parents[2])
    frames = traceback.extract_tb(error.__traceback__)
    ours = [
        frame
        for frame in frames
        if frame.filename.startswith((f"{here}/multigpu_cli/", f"{here}/train_multi_gpu", f"{here}/main_multi_gpu"))
    ]
    theirs = [frame for frame in frames if frame not in ours and not _installed(frame.filename)]
    shown = theirs[-3:] or ours[-2:]
    kind = "training failed" if theirs or isinstance(error, (OSError, RuntimeError, MemoryError)) else "internal error"
    said = str(error).strip().splitlines()[:5]
    lines = [f"error: {kind}: {type(error).__name__}: {' '.join(said[:1])}"]
    lines += [f"  {line}" for line in said[1:]]
    lines += [f"  in {frame.filename}:{frame.lineno} {frame.name}: {frame.line}" for frame in shown]
    lines += [f"  {note}" for note in getattr(error, "__notes__", ())]
    return "\n".join([*lines, f"  try: {remedy_for(error) or '--debug, which shows the whole traceback'}"])


def _installed(file: str) -> bool:
    return "site-packages" in file or file.startswith((sysconfig.get_path("stdlib"), "<frozen"))


def shortened(message: str) -> str:
    """What fits on a screen."""
    lines = message.splitlines()
    if len(lines) < _LONGEST:
        return message
    return "\n".join([*lines[: _LONGEST - 2], f"  … and {len(lines) - _LONGEST + 2} more lines: --debug shows all"])
