"""On a GPU: our whole runs against the limit of the same model on batches that lie ready on the device.

    make gpu-bench              # or python -m benchmarks.gpu [JOB …]; a call takes ten minutes at most
    make gpu-bench              # the same again goes on where that ended

Each side of each job is measured in a process of its own, turn by turn, so that one that fails costs nobody else's
figure and no side lives in the other's memory. Each figure is one JSON object on a line of its own, on stdout and in
the file --into. What is in there is not measured again (with --again: unless it failed). Without CUDA it says what it
would have measured and ends well. Exit code: 0, 1 where something failed, 75 where the same command has to go on.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu_workloads import CannotRun, Job, check_compiler, data_dir, jobs
from benchmarks.paired_timing import ROOT, Row, row, table
from tests.gpu.machine import code_mark

STOPPED = 75  # as of a run that was stopped: the same command again goes on
_TAIL = 15  # lines of an error that are kept
_HOMES = (ROOT / "shared" / "data", ROOT.parent / "shared" / "data")


class Turn(NamedTuple):
    """One measurement."""

    job: str
    side: str
    number: int


def plan_turns(wanted: Mapping[str, Job], turns: int) -> list[Turn]:
    """Turn by turn, so that whoever stops early has something of everything, and a noisy time disturbs all alike."""
    return [Turn(name, side, n) for n in range(turns) for name, job in wanted.items() for side in job.sides]


def measured_before(file: Path, about: Mapping[str, Any]) -> dict[Turn, dict[str, Any]]:
    """What earlier calls have found, or failed to find, on the same GPU with the same torch and the same code."""
    if not file.exists():
        return {}
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    return {
        Turn(each["job"], each["side"], each["turn"]): each
        for each in rows
        if all(each.get(name) == value for name, value in about.items())
    }


def measure(turn: Turn, data: Mapping[str, str], seconds: float, *, tiny: bool) -> dict[str, Any]:
    """Have a process measure it; what it found, or why it found nothing.

    Raises:
        TimeoutExpired: it took longer than so many seconds.
    """
    command = [sys.executable, "-m", "benchmarks.gpu_side", turn.job, turn.side, *(["--tiny"] if tiny else [])]
    command += [word for name, value in data.items() for word in (f"--{name.replace('_', '-')}", value)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    if done.returncode:
        return {"error": "\n".join(done.stderr.splitlines()[-_TAIL:]) or f"exit code {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def figures(wanted: Mapping[str, Job], rows: Mapping[Turn, Mapping[str, Any]]) -> Iterator[Row]:
    """Medians over the turns; ours as a share of the limit's, turn by turn; peak memory and gaps between kernels."""
    for name, job in wanted.items():
        found = {side: {t.number: r for t, r in rows.items() if (t.job, t.side) == (name, side)} for side in job.sides}
        for side, turns in found.items():
            yield from _of_a_side(f"{job.name}: {side}" if job.build else job.name, list(turns.values()))
        both = [n for n in found["ours"] if n in found.get("limit", {})]
        if both:
            shares = [found["ours"][n]["value"] / found["limit"][n]["value"] for n in both]
            yield row(f"{job.name}: ours / limit", shares, aim=job.aim, at_least=True)


def _of_a_side(name: str, turns: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    parts = {
        "": ("value", 1.0, turns[0]["unit"] if turns else ""),
        ", peak memory": ("peak_memory_bytes", 2.0**-30, "GiB"),
        ", time without a kernel": ("kernel_gaps", 100.0, "%"),
        ", MFU": ("mfu", 100.0, "%"),
        ", reserved memory": ("reserved_bytes", 2.0**-30, "GiB"),
        ", allocator retries": ("allocator_retries", 1.0, ""),
        ", launches of a step": ("launches", 1.0, ""),
        ", CPU time of a step": ("host_seconds", 1e3, "ms"),
    }
    for label, (field, scale, unit) in parts.items():
        values = [scale * each[field] for each in turns if each.get(field) is not None]
        if values:
            yield row(name + label, values, unit=unit)


def run(asked: argparse.Namespace, wanted: Mapping[str, Job], about: Mapping[str, Any]) -> int:
    """Measure what is not measured yet, as far as the time reaches; the exit code."""
    before, turns = measured_before(asked.into, about), plan_turns(wanted, asked.turns)
    enough = {"value"} if asked.again else {"value", "error"}
    rows = {turn: before[turn] for turn in turns if enough & before.get(turn, {}).keys()}
    until, left_over = time.monotonic() + asked.seconds, False
    with tempfile.TemporaryDirectory() as scratch, asked.into.open("a") as file:
        for turn in [turn for turn in turns if turn not in rows]:
            found = _tried(turn, wanted[turn.job], asked, until - time.monotonic(), Path(scratch))
            if left_over := found is None:
                break
            rows[turn] = {"job": turn.job, "side": turn.side, "turn": turn.number, **about, **found}
            for where in (sys.stdout, file):
                print(json.dumps(rows[turn]), file=where, flush=True)
    _tell(list(figures(wanted, {turn: found for turn, found in rows.items() if found.get("value") is not None})))
    if left_over:
        print("not all is measured: the same command again goes on", file=sys.stderr)
        return STOPPED
    return 1 if any("error" in found for found in rows.values()) else 0


def _tried(turn: Turn, job: Job, asked: argparse.Namespace, seconds: float, scratch: Path) -> dict[str, Any] | None:
    """What came of it; None where the time was too short for it, unless a whole call is."""
    if seconds < asked.least:
        return None
    try:
        check_compiler(job)
        data = data_dir(job, [asked.data] if asked.data else _HOMES, scratch) if turn.side == "ours" else {}
    except CannotRun as missing:
        return {"skipped": str(missing)}
    try:
        return measure(turn, data, seconds, tiny=asked.tiny)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {seconds:.0f} s"} if seconds > 0.9 * asked.seconds else None


def _tell(found: list[Row]) -> None:
    print(table(found), file=sys.stderr)
    for each in found:
        about = asdict(each)
        print(json.dumps({"figure": about.pop("name"), **about, "verdict": each.verdict}), flush=True)


def main(words: Iterable[str] | None = None) -> int:
    known = jobs()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"of {', '.join(known)}; default: all")
    parser.add_argument("--into", type=Path, default=Path("gpu-bench.jsonl"), help="file of figures, to which is added")
    parser.add_argument("--data", type=Path, help="folder that holds har and fashion-mnist")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=570, help="that this call may take")
    parser.add_argument("--least", type=float, default=60, help="seconds without which nothing more is begun")
    parser.add_argument("--again", action="store_true", help="measure again what failed in an earlier call")
    parser.add_argument("--tiny", action="store_true", help="as short as can be; the figures mean nothing")
    asked = parser.parse_args(None if words is None else list(words))
    if unknown := set(asked.jobs) - set(known):
        parser.error(f"no job {', '.join(sorted(unknown))}: of {', '.join(known)}")
    wanted = {name: job for name, job in jobs(tiny=asked.tiny).items() if not asked.jobs or name in asked.jobs}
    if not torch.cuda.is_available():
        for job in wanted.values():
            print(f"skipped: {job.name}: there is no CUDA", file=sys.stderr)
        return 0
    code = code_mark("multigpu_cli/**/*.py", "benchmarks/gpu*.py", "configs/*.yaml")
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "tiny": asked.tiny, "code": code}
    return run(asked, wanted, about)


if __name__ == "__main__":
    sys.exit(main())
