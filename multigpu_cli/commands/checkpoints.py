"""The checkpoints of a run as a table: which are whole, and from which a run would go on; without torch."""

import time
from dataclasses import asdict
from pathlib import Path

from multigpu_cli.checkpoint.inspect import CheckpointEntry, list_checkpoints
from multigpu_cli.monitor.journal import dump_json


def verify_checkpoints(run: str) -> list[CheckpointEntry]:
    """All checkpoints of a run folder, verified.

    Raises:
        RequestError: the folder holds no run.
    """
    return list_checkpoints(Path(run))


def is_healthy(entries: list[CheckpointEntry]) -> bool:
    """Whether a run could go on, and nothing in the folder is damaged."""
    return any(entry.resumes for entry in entries) and all(entry.state != "damaged" for entry in entries)


def print_checkpoints(run: str, entries: list[CheckpointEntry], *, as_json: bool) -> None:
    """Print one line each."""
    if as_json:
        content = {"run": run, "healthy": is_healthy(entries), "checkpoints": [asdict(entry) for entry in entries]}
        print(dump_json(content, indent=2))
        return
    width = max((len(entry.name) for entry in entries), default=0)
    now = time.time()
    for entry in entries:
        workers = "" if entry.world_size is None else f"{entry.world_size} worker{'s' * (entry.world_size != 1)}"
        verdict = (
            "whole, a run goes on from here" if entry.resumes else ": ".join(filter(None, (entry.state, entry.reason)))
        )
        size, age = _format_size(entry.bytes), _format_age(now - entry.written)
        print(f"{entry.name:<{width}}  {size:>9}  {age:>12}  {workers:<10}  {verdict}")
    if not any(entry.resumes for entry in entries):
        print(f"{run} has no checkpoint that a run could go on from")


def _format_size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def _format_age(seconds: float) -> str:
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = int(seconds / length)
            return f"{count} {unit}{'s' * (count != 1)} ago"
    return "just now"
