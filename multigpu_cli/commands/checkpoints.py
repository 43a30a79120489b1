"""The checkpoints of a run as a table: which are whole, and from which a run would go on; without torch."""

import time
from collections.abc import Iterator

from multigpu_cli.checkpoint.inspect import CheckpointEntry
from multigpu_cli.commands.output import format_size
from multigpu_cli.errors import pluralize


def is_healthy(entries: list[CheckpointEntry]) -> bool:
    """Whether a run could go on, and nothing in the folder is damaged."""
    return any(entry.resumes for entry in entries) and all(entry.state != "damaged" for entry in entries)


def format_checkpoints(run: str, entries: list[CheckpointEntry]) -> Iterator[str]:
    """One line each."""
    width = max((len(entry.name) for entry in entries), default=0)
    now = time.time()
    for entry in entries:
        workers = "" if entry.world_size is None else pluralize(entry.world_size, "worker")
        verdict = ": ".join(filter(None, (entry.state, entry.reason)))
        if entry.resumes:
            verdict = "whole, a run goes on from here"
        size, age = format_size(entry.bytes), _format_age(now - entry.written)
        yield f"{entry.name:<{width}}  {size:>9}  {age:>12}  {workers:<10}  {verdict}"
    if not any(entry.resumes for entry in entries):
        yield f"{run} has no checkpoint that a run could go on from"


def _format_age(seconds: float) -> str:
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            return f"{pluralize(int(seconds / length), unit)} ago"
    return "just now"
