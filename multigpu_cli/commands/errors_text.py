"""The texts of errors on stderr."""

from textwrap import wrap
from typing import Any

from multigpu_cli.config.schema import SETTINGS
from multigpu_cli.errors import TrainingError, did_you_mean

_LONGEST = 15  # lines
_ELSEWHERE = {
    "--learning-rate": "--lr",
    "--dataset": "--data",
    "--output-dir": "--save-dir",
    "--checkpoint-dir": "--save-dir",
    "--workers": "--nproc-per-node for processes, --num-workers for those that load data",
    "--num-gpus": "--nproc-per-node for how many, --gpu-ids for which",
    "--gpus": "--nproc-per-node for how many, --gpu-ids for which",
    "--accumulate": "--grad-accum-steps",
    "--gradient-accumulation-steps": "--grad-accum-steps",
    "--patience": "--early-stopping-patience",
    "--dropout": "--set model.args.dropout=0.1",
    "--fp16": "--amp fp16",
    "--bf16": "--amp bf16",
    "--local-rank": "--nproc-per-node N, or torchrun in the place of torch.distributed.launch",
}
"""Our names for flags of other programs, where the spelling is too different to guess."""


def describe_usage_error(error: Any) -> str:
    """A usage error of Typer as problem and remedy."""
    message = (error.message or error.format_message()).rstrip(".")  # a missing argument has only the second
    return f"error: {message[:1].lower()}{message[1:]}\n  try: {_find_remedy(error)}"


def _find_remedy(error: Any) -> str:
    wrong = str(getattr(error, "option_name", ""))
    if elsewhere := _ELSEWHERE.get(wrong):
        return elsewhere
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


def describe_known_error(error: TrainingError) -> str:
    """A TrainingError as problem and remedy; several broken rules follow each other."""
    message = str(error)
    return "\n".join(line if line.startswith(" ") else f"error: {line}" for line in message.splitlines())


def shorten_message(message: str, columns: int | None = None) -> str:
    """The message in at most 15 lines.

    Args:
        columns: width of the terminal, at which lines are folded between words; None without a terminal.
    """
    lines = message.splitlines()
    if len(lines) >= _LONGEST:
        lines = [*lines[: _LONGEST - 2], f"  … and {len(lines) - _LONGEST + 2} more lines: --debug shows all"]
    return "\n".join(lines if columns is None else [part for line in lines for part in _fold_line(line, columns)])


def _fold_line(line: str, columns: int) -> list[str]:
    """A longer word, such as a path, stays whole, so that it can be copied."""
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return wrap(line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [""]
