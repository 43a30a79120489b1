"""Every benchmark, one after the other, each in a process of one thread: what `make bench` runs.

    python -m benchmarks.suite                 # beside the last recorded result
    python -m benchmarks.suite --record NAME   # also writes benchmarks/results/NAME.json

The suite needs a quiet machine of two cores and takes under ten minutes there.
"""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.paired_timing import ONE_THREAD, ROOT, Row, align, table

PARTS = (
    *("startup", "step_overhead", "monitoring", "data_path", "end_to_end", "ddp", "fsdp", "checkpoints", "trading"),
    *("companions", "hooks", "rows", "ppo", "peers", "peers_ddp"),
)
RESULTS = ROOT / "benchmarks" / "results"
OLD = RESULTS / "reference" / "6d24263.json"  # before features were added one by one, and their sum was not watched
SUM = (
    "defaults / hand-written, both fused and clipped",
    "bare / hand-written, both fused",
    "DDP, MLP: ours at defaults / raw, both fused and clipped",
    "first step: ours / hand-written",
    "peak memory: ours / hand-written",
)
"""What users pay: a step at defaults, bare and under DDP, the first step, memory."""


def part(name: str, *, tiny: bool = False) -> list[Row]:
    """The rows of one benchmark.

    Raises:
        RuntimeError: it failed; its last lines have gone to stderr.
    """
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", *(["--tiny"] if tiny else [])]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | ONE_THREAD, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"benchmarks.{name} ended with exit code {done.returncode}")
    return [Row(**fields) for fields in json.loads(done.stdout.splitlines()[-1])]


def last_recorded(folder: Path = RESULTS) -> dict[str, float]:
    """Figure → its last median, by the times written in the files of results, some of which hold a few parts only."""
    found = sorted((json.loads(file.read_text()) for file in folder.glob("*.json")), key=lambda result: result["time"])
    return {each["name"]: each["value"] for result in found for each in result["rows"]}


def sum_up(rows: Iterable[Row], before: Mapping[str, float]) -> str:
    """The figures of SUM beside those recorded last and those of 6d24263, which were measured on one machine."""
    old = last_recorded(OLD.parent)
    lines: list[tuple[str, ...]] = [("what users pay", "now", "recorded", OLD.stem, "now / " + OLD.stem)]
    for each in (row for row in rows if row.name in SUM):
        then = before.get(each.name, math.nan)
        figures = (each.value, then, old[each.name], each.value / old[each.name])
        lines.append((each.name, *(f"{figure:.3f}" for figure in figures)))
    return align(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", default=[], metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--record", metavar="NAME")
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    before, rows = last_recorded(), []
    for name in asked.parts or PARTS:
        began = time.perf_counter()
        found = part(name, tiny=asked.tiny)
        print(f"\n{name} ({time.perf_counter() - began:.0f} s)\n{table(found, before)}", flush=True)
        rows += found
    print(f"\n{sum_up(rows, before)}")
    if asked.record:
        facts = {"time": time.time(), "python": platform.python_version(), "cores": os.cpu_count()}
        RESULTS.mkdir(exist_ok=True)
        text = json.dumps(facts | {"rows": [vars(each) for each in rows]}, indent=1)
        (RESULTS / f"{asked.record}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
