"""The checkpoints of a run as a table: which are whole, and from which a run would go on; without torch."""

import time
from dataclasses import asdict
from pathlib import Path

from multigpu_cli.checkpoint.listing import Entry, listed
from multigpu_cli.monitor.journal import valid_json


def examined(run: str) -> list[Entry]:
    """All checkpoints of a run folder, verified.

    Raises:
        RequestError: the folder holds no run.
    """
    return listed(Path(run))


def healthy(entries: list[Entry]) -> bool:
    """Whether a run could go on, and nothing in the folder is damaged."""
    return any(entry.resumes for entry in entries) and all(entry.state != "damaged" for entry in entries)


def show(run: str, entries: list[Entry], *, as_json: bool) -> None:
    """Print one line each."""
    if as_json:
        found = {"run": run, "healthy": healthy(entries), "checkpoints": [asdict(entry) for entry in entries]}
        print(valid_json(found, indent=2))
        return
    width = max((len(entry.name) for entry in entries), default=0)
    now = time.time()
    for entry in entries:
        workers = "" if entry.world_size is None else f"{entry.world_size} worker{'s' * (entry.world_size != 1)}"
        verdict = (
            "whole, a run goes on from here" if entry.resumes else ": ".join(filter(None, (entry.state, entry.reason)))
        )
        print(
            f"{entry.name:<{width}}  {_size(entry.bytes):>9}  {_age(now - entry.written):>12}  {workers:<10}  {verdict}"
        )
    if not any(entry.resumes for entry in entries):
        print(f"{run} has no checkpoint that a run could go on from")


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def _age(seconds: float) -> str:
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = int(seconds / length)
            return f"{count} {unit}{'s' * (count != 1)} ago"
    return "just now"
