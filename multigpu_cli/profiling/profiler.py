"""`multigpu profile RUN`, on the side of the run: torch.profiler over some steps of a training at work.

All ranks profile the same steps: one that did so alone would be slower than the others, and their wait for it would
count as communication. Each gives its table of operators; the trace, megabytes a step, is rank 0's.
"""

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.profiler import profile

from multigpu_cli.checkpoint.files import publish
from multigpu_cli.distributed.world import all_gather_object
from multigpu_cli.monitor.journal import dump_json
from multigpu_cli.run.assembly.components import StepResult
from multigpu_cli.run.part import Part
from multigpu_cli.run.run import Run

_MOST = 50  # operators of a rank's table


class Profiling(Part):
    """Profiles the next steps of a run, no more than are left; its own time is not counted as training."""

    def __init__(self, run: Run, steps: int, number: str) -> None:
        self._number, self._first, self._moments = number, run.progress.step, run.moments
        self._last = min(self._first + steps, run.plan.schedule.total_steps)
        self._thread = threading.get_ident()
        with run.observer.timer.pause():
            self._profile = profile()
            self._profile.start()
        run.observer.watchdog.mark_progress()
        self._began = time.perf_counter()

    def step_end(self, run: Run, step: int, outcome: StepResult) -> None:
        if step + 1 < self._last:
            return
        with run.observer.timer.pause():
            seconds = time.perf_counter() - self._began
            self._profile.stop()
            run.observer.watchdog.mark_progress()
            table = {"seconds": seconds, "operators": list_operators(self._profile.key_averages())}
            ranks = all_gather_object(run.world, table)
            run.moments = self._moments
            if run.world.is_main:
                self._write(run, ranks)

    def end(self, run: Run, summary: Mapping[str, Any]) -> None:
        """The run has ended before the last of these steps."""
        if threading.get_ident() == self._thread:  # else the watchdog's, which ends the process
            self._profile.stop()

    def _write(self, run: Run, ranks: list[dict[str, Any]]) -> None:
        """Write the trace, and then the tables, which are the answer to the request."""
        logs, name = run.folder / "logs", f"trace_{self._first:08d}.json.gz"
        facts = {"step": self._first, "steps": self._last - self._first, "trace": f"logs/{name}"}
        answer = dump_json({"id": self._number, **facts, "ranks": ranks}).encode()
        try:
            with TemporaryDirectory() as folder:  # torch takes a name, and would follow a link that was planted there
                self._profile.export_chrome_trace(str(trace := Path(folder, name)))
                publish(logs / name, trace.read_bytes(), run.observer.watchdog.mark_progress)
            publish(logs / f"profile_{self._first:08d}.json", answer, run.observer.watchdog.mark_progress)
        except OSError as error:
            run.log_fault("profile", f"the profile was not written: {error}")
        else:
            run.log.journal.write("profile", **facts)
        run.log.state.finish_request()


def list_operators(averages: Any) -> list[dict[str, Any]]:
    """Rows of a profile's `key_averages`, the longest first: name, calls, and milliseconds of the host and of the GPU.

    The time of an operator is its own, without those that it calls; on the GPU it is that of the kernels that it
    launched. These have rows of their own in a profile, which would count their time twice.
    """
    rows = []
    for each in averages:
        if each.device_type.name != "CPU":
            continue
        host, gpu = each.self_cpu_time_total / 1e3, each.self_device_time_total / 1e3
        rows.append({"name": each.key[:120], "calls": each.count, "host_ms": host, "gpu_ms": gpu})
    by = "gpu_ms" if any(row["gpu_ms"] for row in rows) else "host_ms"
    return sorted(rows, key=lambda row: -row[by])[:_MOST]
