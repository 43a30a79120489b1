"""How every benchmark measures: rivals in turn in one process, so that a noisy machine disturbs them alike.

A turn is a stretch of steps of which the first, which finds the rival's data in the caches, is not counted. The turns
are cut into blocks. A block's figure is its 10th percentile (what disturbs only adds), the result is the median over
blocks, the spread the least and the most of them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
ONE_THREAD = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
BLOCKS = 7
STRETCH = 4  # steps of a turn

Clock = Callable[[], float]


@dataclass(frozen=True)
class Row:
    """One figure of a benchmark.

    Attributes:
        name: what was measured, and against what.
        value, least, most: median and spread over blocks or pairs.
        unit: ratio, µs, s, …
        aim: what it should be at most (at least, where it is a share of a limit); None where it only informs.
        at_least: greater is better.
    """

    name: str
    value: float
    least: float
    most: float
    unit: str = "ratio"
    aim: float | None = None
    at_least: bool = False

    @property
    def verdict(self) -> str:
        if self.aim is None:
            return ""
        good = self.value >= self.aim if self.at_least else self.value <= self.aim
        return f"{'≥' if self.at_least else '≤'} {self.aim:g}{'' if good else ' missed'}"


def row(name: str, values: Sequence[float], **more: Any) -> Row:
    """The median of some values and their spread."""
    return Row(name, statistics.median(values), min(values), max(values), **more)


class Seconds:
    """What each side took, turn by turn.

    Attributes:
        stretch, skipped: steps of a turn, and how many of them, the first ones, are not counted.
        count: blocks into which the turns are cut.
    """

    def __init__(self, clock: Clock = time.thread_time, stretch: int = STRETCH, skipped: int = 1) -> None:
        self.clock, self.stretch, self.skipped = clock, stretch, skipped
        self.of: dict[str, list[float]] = {}
        self.count = BLOCKS

    def add(self, side: str, seconds: float) -> None:
        self.of.setdefault(side, []).append(seconds)

    def turn(self, side: str, work: Callable[[], object]) -> None:
        for position in range(self.stretch):
            began = self.clock()
            work()
            if position >= self.skipped:
                self.add(side, self.clock() - began)

    def blocks(self, side: str) -> list[float]:
        """The 10th percentile of each block; the first tenth of the turns is warm-up."""
        turns = self.of[side][len(self.of[side]) // 10 :]
        size = max(1, len(turns) // self.count)
        return [tenth(turns[at : at + size]) for at in range(0, size * min(self.count, len(turns)), size)]

    def ratio(self, name: str, ours: str, theirs: str, **more: Any) -> Row:
        """ours / theirs, block by block."""
        pairs = zip(self.blocks(ours), self.blocks(theirs), strict=True)
        return row(name, [one / other for one, other in pairs], **more)

    def over(self, name: str, ours: str, theirs: str, **more: Any) -> Row:
        """ours - theirs in µs, block by block."""
        pairs = zip(self.blocks(ours), self.blocks(theirs), strict=True)
        return row(name, [1e6 * (one - other) for one, other in pairs], unit="µs", **more)

    def micro(self, name: str, side: str, per: int = 1, **more: Any) -> Row:
        """µs of one turn, or of each of the `per` things in it."""
        return row(name, [1e6 * block / per for block in self.blocks(side)], unit="µs", **more)


def tenth(values: Iterable[float]) -> float:
    """The 10th percentile (nearest rank)."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 10]


def alternate(sides: Mapping[str, Callable[[], object]], turns: int, clock: Clock = time.thread_time) -> Seconds:
    """Let the sides take so many turns, one after the other."""
    seconds = Seconds(clock)
    for _ in range(turns):
        for side, work in sides.items():
            seconds.turn(side, work)
    return seconds


class Spent(NamedTuple):
    """What a process took from start to end: CPU seconds of all its threads and children, and bytes at its peak."""

    cpu: float
    peak: int


def spent(arguments: Sequence[str], *, folder: Path = ROOT, code: int | None = 0) -> Spent:
    """Run a Python program, which can import what lies in the project's folder, and see what it took.

    Args:
        code: the exit code that it must have; None for any.
    """
    null, environ = subprocess.DEVNULL, os.environ | ONE_THREAD | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, *arguments], cwd=folder, env=environ, stdout=null, stderr=null)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if code is not None and process.returncode != code:
        raise RuntimeError(f"exit code {process.returncode} instead of {code}: {' '.join(arguments)}")
    return Spent(used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)


def table(rows: Sequence[Row], before: Mapping[str, float] | None = None) -> str:
    """Median, spread, aim, and the last recorded median, a line for each figure."""
    lines = [("figure", "median", "spread", "unit", "aim", "recorded")]
    for each in rows:
        recorded = (before or {}).get(each.name)
        lines.append(
            (
                *(each.name, f"{each.value:.3g}", f"{each.least:.3g} … {each.most:.3g}", each.unit, each.verdict),
                "" if recorded is None else f"{recorded:.3g}",
            )
        )
    return align(lines)


def align(lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells as a table; the first line is its head."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def program(measure: Callable[[bool], list[Row]], about: str | None) -> None:
    """The command line of a benchmark: --tiny only shows that it runs, --json is for the suite."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="as short as can be; the figures mean nothing")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    rows = measure(asked.tiny)
    print(json.dumps([asdict(each) for each in rows]) if asked.json else table(rows))
    sys.stdout.flush()
    os._exit(0)  # past torch's exit, where gloo now and then aborts a process that is done
