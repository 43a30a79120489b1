"""Every benchmark, one after the other, each in a process of one thread: what `make bench` runs.

    python -m benchmarks.suite                 # beside the last recorded result
    python -m benchmarks.suite --record NAME   # also writes benchmarks/results/NAME.json

The suite needs a quiet machine of two cores and takes under ten minutes there.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.paired_timing import ONE_THREAD, ROOT, Row, table

PARTS = (
    *("startup", "step_overhead", "monitoring", "data_path", "end_to_end", "ddp", "fsdp", "checkpoints", "trading"),
    *("companions", "hooks", "rows", "ppo", "peers", "peers_ddp"),
)
RESULTS = ROOT / "benchmarks" / "results"


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
    if asked.record:
        facts = {"time": time.time(), "python": platform.python_version(), "cores": os.cpu_count()}
        RESULTS.mkdir(exist_ok=True)
        text = json.dumps(facts | {"rows": [vars(each) for each in rows]}, indent=1)
        (RESULTS / f"{asked.record}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
