"""`multigpu profile RUN`, on the side of the user: asks a run at work for a profile, and shows it; without torch."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

from multigpu_cli.checkpoint.files import is_locked, read_owner
from multigpu_cli.config.regular_files import refuse_links
from multigpu_cli.errors import RequestError, TrainingError, pluralize
from multigpu_cli.monitor.history import JOURNAL, load_summary
from multigpu_cli.monitor.journal import read_json
from multigpu_cli.monitor.run_state import REQUEST, STATE

_LOOK = 0.2  # seconds
_ROWS = 15


def profile_run(run: str, steps: int) -> dict[str, Any]:
    """Ask the training in this folder for a profile of so many steps; returns what it has written, with the paths.

    RequestError: nothing trains there, or not here, or it is profiled. TrainingError: it ended, or could not write.
    """
    folder, number = Path(run), uuid4().hex
    request = folder / REQUEST
    _check_trains_here(run, folder)
    try:
        with open(request, "x") as words:
            words.write(f"profile {steps} {number}")
    except OSError as error:
        raise RequestError(f"{request}: {error.strerror}", remedy="the same command, as the user who trains") from error
    try:
        while request.exists() and is_locked(folder):
            time.sleep(_LOOK)
    finally:
        request.unlink(missing_ok=True)
    for file in folder.glob("logs/profile_*.json"):
        if (found := read_json(file, "profile")).get("id") == number and found["ranks"]:
            return found | {"run": run, "file": str(file), "trace": str(folder / found["trace"])}
    problem = f"{run}: the run has ended, or could not write, before {pluralize(steps, 'step')} were profiled"
    raise TrainingError(problem, remedy=f"multigpu status {run} says which")


def _check_trains_here(run: str, folder: Path) -> None:
    owner, state, status = read_owner(folder), read_json(folder / STATE, STATE), load_summary(folder).get("status")
    host, here = owner.partition(" ")[0], os.uname().nodename
    for wrong, problem, remedy in (
        (not (folder / JOURNAL).is_file(), f"is not a run folder: it has no {JOURNAL}", "the --save-dir of a run"),
        (status, f"the run has ended ({status})", "profile a run while it trains"),
        (host not in ("", here), f"the run is on another host, {host}", f"the same command on {host}"),
        (not is_locked(folder), "the run is not running", "start it, and profile it while it trains"),
        (owner != f"{here} {state.get('pid')}", "the run is starting", "the same command in a moment"),
        ((folder / REQUEST).exists(), "the run is being profiled already", "wait for the end of that profile"),
    ):
        if wrong:
            raise RequestError(f"{run}: {problem}", remedy=remedy)
    refuse_links(folder)


def format_profile(found: dict[str, Any]) -> Iterator[str]:
    """The top operators of rank 0, and the least and the most that a rank spent in each."""
    ranks = [{row["name"]: row for row in rank["operators"]} for rank in found["ranks"]]
    clock = "gpu_ms" if any(row["gpu_ms"] for row in ranks[0].values()) else "host_ms"
    total = sum(row[clock] for row in ranks[0].values()) or 1.0
    seconds = ", ".join(f"rank {number} {rank['seconds']:.2f} s" for number, rank in enumerate(found["ranks"]))
    seconds += "; profilers that started first waited for the others" if found["ranks"][1:] else ""
    yield f"{pluralize(found['steps'], 'step')} after step {found['step']:,}, from the profiler's start: {seconds}"
    yield f"{clock.replace('_', ' '):>9} {'share':>7} {'calls':>7} {'all ranks':>17}  operator (its own time on rank 0)"
    for name, row in list(ranks[0].items())[:_ROWS]:
        values = [rank[name][clock] for rank in ranks if name in rank]
        spread = f"{min(values):,.1f}…{max(values):,.1f}"
        yield f"{row[clock]:>9,.1f} {row[clock] / total:>7.1%} {row['calls']:>7,} {spread:>17}  {name[:60]}"
    yield f"operators of all ranks: {found['file']}"
    yield f"trace of rank 0, for https://ui.perfetto.dev or chrome://tracing: {found['trace']}"
