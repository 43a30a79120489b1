"""Communication over a loopback that is throttled: in a network namespace of its own, so that nobody else's is."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.netns, pytest.mark.root]

ROOT = Path(__file__).resolve().parents[2]
RATE = 25e6  # bytes a second
THROTTLE = "tc qdisc add dev lo root tbf rate 200mbit burst 64kb latency 1s"
PARAMETERS = 289_450  # of the digits' network, 4 bytes each


def in_a_namespace(words: list[str], *, throttled: bool) -> str:
    command = f'ip link set lo mtu 1500 up && {THROTTLE if throttled else "true"} && exec "$@"'
    program = [sys.executable, str(ROOT / "main_multi_gpu.py"), *words, "--multi-gpu", "ddp", "--nproc-per-node", "2"]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    line = ["unshare", "-n", "sh", "-c", command, "sh", *program]
    return subprocess.run(line, check=True, env=environ, timeout=300, stdout=subprocess.PIPE, text=True).stdout


def measure_exposed_ms(folder: Path, *, throttled: bool) -> float:
    flags = ["--max-steps", "40", "--log-interval", "5", "--quiet", "--save-dir", str(folder)]
    in_a_namespace(flags, throttled=throttled)
    events = map(json.loads, (folder / "journal.jsonl").read_text().splitlines())
    lines: list[dict[str, Any]] = [event for event in events if event["event"] == "train"][1:]
    return float(statistics.median(line["comm_share"] * line["step_ms"] for line in lines))


def test_a_slow_wire_is_communication(tmp_path: Path) -> None:
    """Both workers' gradients go through the one loopback; backward hides a little of it."""
    free, slow = (measure_exposed_ms(tmp_path / str(kind), throttled=kind) for kind in (False, True))
    through_the_wire = 1e3 * 2 * 4 * PARAMETERS / RATE
    assert slow - free == pytest.approx(through_the_wire, rel=0.3)


def test_the_doctor_measures_the_wire_that_is_there(tmp_path: Path) -> None:
    """Two workers share the loopback, so that each gets half of its rate."""
    said = in_a_namespace(["doctor", "--json", "--save-dir", str(tmp_path / "run")], throttled=True)
    (found,) = [entry for entry in json.loads(said)["findings"] if entry["name"] == "all-reduce (gloo)"]
    size, seconds = found["numbers"]["by_size"][-1]
    assert size / seconds == pytest.approx(RATE / 2, rel=0.3)
