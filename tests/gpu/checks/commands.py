"""The commands that look at a GPU, or train on it briefly."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.gpu.front_door import FRONT_DOOR
from tests.gpu.machine import ROOT, patience

_LONGEST = patience(170)  # seconds


def doctor(folder: Path) -> dict[str, Any]:
    """It sees the GPU, measures it, and finds nothing broken about it; what else the machine lacks is listed."""
    found = _run_json("doctor", "--save-dir", str(folder), codes=(0, 1))["findings"]
    verdicts = {each["name"]: each["verdict"] for each in found}
    of_gpus = {name: verdict for name, verdict in verdicts.items() if "GPU" in name or name == "versions"}
    measured = {"GPU 0", "host to GPU 0"} & {name for name, verdict in of_gpus.items() if verdict in ("ok", "warn")}
    assert len(measured) == 2, of_gpus
    assert "fail" not in of_gpus.values(), [each for each in found if each["verdict"] == "fail"]
    not_ok = [each for each in found if each["verdict"] not in ("ok", "not checked")]
    # results are published: the lines after the first name processes with their commands, and so places of the machine
    return {"not_ok": [each | {"evidence": each["evidence"].partition("\n")[0]} for each in not_ok]}


def plan(folder: Path) -> dict[str, Any]:
    """It measures on the GPU, and knows how many samples its memory takes."""
    found = _run_json("plan", "--save-dir", str(folder))
    capacity, total = found["capacity"], torch.cuda.get_device_properties(0).total_memory
    assert capacity, found
    assert all(row["samples_per_second"] > 0 for row in found["rows"]), found["rows"]
    return {"capacity": capacity, "total_memory": total, "memory": found.get("memory"), "rows": found["rows"][:2]}


def selftest(folder: Path) -> dict[str, Any]:
    """One worker and several do the same."""
    found = _run_json("selftest", "--save-dir", str(folder))
    assert found["holds"], found["verdicts"]
    return {"verdicts": found["verdicts"]}


def _run_json(name: str, *flags: str, codes: tuple[int, ...] = (0,)) -> dict[str, Any]:
    """What a command says with --json."""
    words = [sys.executable, FRONT_DOOR, name, "--json", *flags]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=_LONGEST)
    assert done.returncode in codes, f"exit code {done.returncode}: {done.stderr[-1500:]}{done.stdout[-1500:]}"
    return dict(json.loads(done.stdout))
