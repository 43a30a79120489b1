"""Runs of the command line, as users start them, held against what a check expects of them."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from multigpu_cli.monitor import journal
from tests.gpu.machine import ROOT, is_simulated, patience

FRONT_DOOR = str(ROOT / "main_multi_gpu.py")
ALONE = ("--multi-gpu", "none")
# A simulated GPU computes on the CPU.
DIGITS: dict[str, Any] = {"epochs": "2", "model": "mlp"} if is_simulated() else {"epochs": "6"}
GOOD_ENOUGH = 0.7 if is_simulated() else 0.93  # test accuracy reached with room to spare; a broken path stays far below
_LONGEST = patience(170)  # seconds; a check has more


class Run(NamedTuple):
    """A finished run.

    Attributes:
        code: its exit code.
        summary: of summary.json as it printed it; {} where it printed none.
        events: its journal.
        said: what it told people.
    """

    code: int
    summary: dict[str, Any]
    events: list[journal.Event]
    said: str

    def of(self, kind: str) -> list[journal.Event]:
        """The journal's events of one kind."""
        return [event for event in self.events if event["event"] == kind]


def command(folder: Path, *flags: str, ranks: int = 0) -> list[str]:
    """The words that start a run.

    Args:
        ranks: under torchrun, in so many processes; 0: without it.
    """
    return [*launcher(ranks), FRONT_DOOR, *flags, "--json", "--save-dir", str(folder)]


def launcher(ranks: int) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [sys.executable, *(torchrun if ranks else [])]


def words(flags: Mapping[str, str]) -> list[str]:
    """Settings by their keys in YAML, as the command line has them."""
    return [word for key, value in flags.items() for word in (f"--{key.replace('_', '-')}", value)]


def sets(*entries: str) -> list[str]:
    """The words of --set for each of these settings."""
    return [word for entry in entries for word in ("--set", entry)]


def run(folder: Path, *flags: str, ranks: int = 0, code: int | None = 0) -> Run:
    """Start a run and wait for it.

    Args:
        code: the exit code that is expected; None: any.

    Raises:
        AssertionError: it ended with another one.
    """
    return run_command(command(folder, *flags, ranks=ranks), folder, code=code)


def run_command(argv: Sequence[str], folder: Path, *, code: int | None = 0) -> Run:
    """The same for any command that trains in this folder and prints its summary last."""
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=_LONGEST)
    good = code in (None, done.returncode)
    assert good, f"exit code {done.returncode} instead of {code}: {done.stderr[-2000:]}"
    printed = done.stdout.splitlines()
    summary = json.loads(printed[-1]) if printed and printed[-1].startswith("{") else {}
    lines = folder / "journal.jsonl"
    return Run(done.returncode, summary, list(journal.read_events(lines)) if lines.exists() else [], done.stderr)


def holds(done: Run, strategy: str, precision: str, devices: Sequence[str] = ("cuda:0",)) -> dict[str, Any]:
    """A run was completed in the way that was asked for, and has learned the digits; its figures.

    Raises:
        AssertionError: what does not hold.
    """
    found, start = done.summary, done.of("start")[-1]
    assert found["status"] == "completed", found["status"]
    expected = {"strategy": strategy, "precision": precision, "device": torch.cuda.get_device_name(0)}
    assert {name: found[name] for name in expected} == expected, f"{expected} expected of {found}"
    assert start["devices"] == list(devices), f"{devices} expected, not {start['devices']}"
    assert all(peak > 0 for peak in found["peak_memory_bytes"]), f"no GPU memory used: {found['peak_memory_bytes']}"
    accuracy = found["final"]["test_accuracy"]
    assert accuracy >= GOOD_ENOUGH, f"test accuracy {accuracy:.1%}, {GOOD_ENOUGH:.0%} expected"
    return figures(done) | expected | {"test_accuracy": accuracy}


def figures(done: Run) -> dict[str, Any]:
    """What is worth knowing of any run."""
    found = done.summary
    names = ("samples_per_second", "startup_seconds", "train_seconds", "steps", "peak_memory_bytes", "faults")
    return {name: found[name] for name in names}


def same_weights(one: Run, other: Run) -> None:
    """Two runs ended with the same bits.

    Raises:
        AssertionError: they did not.
    """
    first, second = one.summary["fingerprint"], other.summary["fingerprint"]
    assert first, "no fingerprint"
    assert first == second, f"fingerprints {first} and {second}"


def losses(done: Run) -> dict[int, float]:
    """The loss of each step that was logged."""
    return {line["step"]: line["loss"] for line in done.of("train")}
