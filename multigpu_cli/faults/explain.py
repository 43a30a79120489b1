"""Says errors to the user: what is wrong, the way out, whether a lost peer caused it, and the lines of the stacks."""

import os
import re
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from multigpu_cli.config.code_names import hide_passwords
from multigpu_cli.config.schema import SETTINGS
from multigpu_cli.config.sources import translate_name
from multigpu_cli.distributed.launch_env import list_secrets
from multigpu_cli.errors import TrainingError, did_you_mean

_LOST_CONNECTION = ("closed by peer", "reset by peer", "timeout caused pair closure", "remote process has terminated")
_GROUP_ERRORS = {"DistNetworkError", "DistStoreError"}
_NCCL_LOST_PEER = re.compile(
    r"ncclremoteerror|remote p(rocess|eer)|communicator was aborted|connection (closed|refused|reset)|broken pipe"
    r"|store->get|timed? ?out|connectfullmesh"
)  # what else NCCL reports, it reports of this rank

_REMEDIES = (
    (
        r"out of memory|_alloc(ation)?_failed",
        "a smaller --batch-size (--global-batch-size keeps the global batch), --amp bf16",
    ),
    (r"address already in use", "another job holds the port: torchrun --standalone, or another --master-port"),
    (r"bus error|shared memory|/dev/shm", "/dev/shm is too small: docker run --shm-size=8g, or --num-workers 0"),
    (r"did not receive grad|finished reduction in the prior iteration", "--find-unused-parameters, or --freeze them"),
    (r"duplicate gpu", "one GPU for each process; the MIG slices of one card count as one"),
    (r"cublas_workspace_config", "CUBLAS_WORKSPACE_CONFIG=:4096:8 python …, since a product came before this import"),
    (r"peer access|p2p|nccl.*(unhandled|system|internal) error", "NCCL_P2P_DISABLE=1 torchrun … (no peer access?)"),
    (r"no space left|disk quota", "free space on that disk, then run the same command again: it resumes"),
    (r"too many open files", "ulimit -n 65536, or fewer --num-workers"),
    (r"dataloader worker.*(killed|exited)", "--num-workers 0 shows the loader's own error"),
    (r"index out of range in self", "an embedding with a row for every number in the data, or smaller numbers"),
    (r"device-side assert", "CUDA_LAUNCH_BLOCKING=1 shows where; labels out of range are the usual reason"),
)


def hide_secrets(text: str) -> str:
    """Return the text of an error without passwords in addresses and values of secret environment variables.

    All texts of exceptions that are shown, written or sent pass it, because a library may quote what it was given.
    """
    return hide_passwords(text, list_secrets())


def is_peer_failure(error: BaseException) -> bool:
    """Whether a rank failed only because another rank had ended; the other rank's error is the one to show."""
    names = {kind.__name__ for kind in type(error).__mro__}
    text = str(error).lower()
    lost = bool(names & _GROUP_ERRORS) or any(word in text for word in _LOST_CONNECTION)
    return lost or ("DistBackendError" in names and _NCCL_LOST_PEER.search(text) is not None)


def remedy_for(error: BaseException) -> str:
    """The remedy for a known failure, or ""."""
    text = f"{type(error).__name__}: {error}".lower()
    return next((remedy for pattern, remedy in _REMEDIES if re.search(pattern, text, re.DOTALL)), "")


def describe_unexpected_error(error: Exception) -> str:
    """Type, message and remedy, with the last lines of the user's code in the traceback, or else of ours."""
    here = str(Path(__file__).resolve().parents[2])
    own_files = (f"{here}/multigpu_cli/", f"{here}/train_multi_gpu", f"{here}/main_multi_gpu")
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(own_files)]
    theirs = [frame for frame in frames if frame not in ours and not is_library_file(frame.filename)]
    shown = theirs[-3:] or ours[-2:]
    kind = "training failed" if theirs or isinstance(error, (OSError, RuntimeError, MemoryError)) else "internal error"
    message = str(error).strip().splitlines()[:5]
    lines = [f"{kind}: {type(error).__name__}: {' '.join(message[:1])}"]
    lines += [f"  {line}" for line in message[1:]]
    lines += [f"  in {frame.filename}:{frame.lineno} {frame.name}: {frame.line}" for frame in shown]
    lines += [f"  {line}" for note in getattr(error, "__notes__", ()) for line in note.splitlines()]
    return hide_secrets("\n".join([*lines, f"  try: {remedy_for(error) or '--debug, which shows the traceback'}"]))


def name_unused_parameters(error: BaseException, trained: Sequence[str]) -> None:
    """Add to DDP's error the names of the parameters that it lists by index among those that take a gradient."""
    found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
    if names := [trained[int(index)] for index in found[1].split() if int(index) < len(trained)] if found else []:
        error.add_note(f"no gradient for: {', '.join(names[:8])}")


def name_small_embedding(error: BaseException) -> None:
    """Add to torch's bare 'index out of range' the number that an embedding was asked for, and how many rows it has."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    values = frames[-1].f_locals if frames and frames[-1].f_code.co_name == "embedding" else {}
    if isinstance(error, IndexError) and {"input", "weight"} <= values.keys():
        numbers, rows = values["input"], len(values["weight"])
        inputs = f"its inputs are {int(numbers.min())} to {int(numbers.max())}"
        error.add_note(f"{inputs}, and the embedding has {rows} rows")


def is_library_file(file: str) -> bool:
    """Whether a source file belongs to Python itself or to an installed package."""
    return "site-packages" in file or file.startswith((str(Path(os.__file__).parent), "<frozen"))


def describe_innermost_line(stack: Sequence[traceback.FrameSummary]) -> str:
    """File, line and function of the innermost frame outside of libraries; "" if there is none."""
    own = [frame for frame in stack if not is_library_file(frame.filename)]
    return f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""


def extract_main_thread_stack() -> traceback.StackSummary:
    """What the main thread executes right now."""
    return traceback.extract_stack(sys._current_frames()[threading.main_thread().ident or 0])


_LONGEST = 15  # lines


def describe_usage_error(error: Any) -> str:
    """A usage error of Typer as problem and remedy."""
    message = (error.message or error.format_message()).rstrip(".")  # a missing argument has only the second
    return f"error: {message[:1].lower()}{message[1:]}\n  try: {_find_remedy(error)}"


def _find_remedy(error: Any) -> str:
    wrong = str(getattr(error, "option_name", "")).lower().replace("_", "-")
    options = {option for parameter in error.ctx.command.params for option in parameter.opts} if error.ctx else set()
    if wrong in options:
        return f"did you mean {wrong!r}?"
    ours = translate_name(wrong.removeprefix("--"), flags=True)
    if ours and {word for word in ours.split() if word.startswith("--")} <= options:
        return ours
    if (key := wrong.removeprefix("--")) in SETTINGS and SETTINGS[key].flag is None:
        return f"--set {key}=…"
    if known := getattr(error, "possibilities", None):
        return did_you_mean(wrong, known)
    if (missing := getattr(error, "param", None)) is None or error.ctx is None:
        return "--help lists all options"
    if missing.opts[0].startswith("--"):
        return f"{missing.opts[0]} {missing.metavar}"
    pieces = [error.ctx.command_path, *error.ctx.command.collect_usage_pieces(error.ctx)]
    return " ".join(pieces).translate(str.maketrans("", "", "{}"))


def describe_error(error: Exception) -> str:
    """Problem and remedy; several broken rules follow each other."""
    text = hide_secrets(str(error)) if isinstance(error, TrainingError) else describe_unexpected_error(error)
    return "\n".join(line if line.startswith(" ") else f"error: {line}" for line in text.splitlines())


def shorten_message(message: str, columns: int | None = None) -> str:
    """The message in at most 15 lines, folded between words at so many columns; None: there is no terminal."""
    lines = message.splitlines()
    if len(lines) >= _LONGEST:
        lines = [*lines[: _LONGEST - 2], f"  … and {len(lines) - _LONGEST + 2} more lines: --debug shows all"]
    return "\n".join(lines if columns is None else [part for line in lines for part in _fold_line(line, columns)])


def _fold_line(line: str, columns: int) -> list[str]:
    """A longer word, such as a path, stays whole, so that it can be copied."""
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return wrap(line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [""]
