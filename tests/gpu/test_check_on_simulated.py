"""make gpu-check on simulated GPUs: its ways are real there, its rates mean nothing."""

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.calling import call_check
from tests.gpu.registry import CHECKS
from tests.gpu.simulated.machine import Machine


def on_simulated(gpus: int, *words: str) -> dict[str, Any]:
    """The end line of a call on a simulated machine, which says what failed and why."""
    found = call_check(Machine.of(gpus).environment(), *words)
    said = {line["check"]: line["said"] for line in found if line.get("verdict") == "failed"}
    return found[-1] | {"said": said}


def test_a_few_checks_on_a_simulated_device(tmp_path: Path) -> None:
    """Rates mean nothing there; that the checks run and what they assert does."""
    few = ("--only", "nccl-one-rank,device-assert", "--results", str(tmp_path / "results.jsonl"))
    end = on_simulated(1, *few)
    assert end["said"] == {}
    assert (end["end"], end["passed"], end["unverified"], end["code"]) == ("green", 1, ["device-assert"], 0)
    assert end["skipped"] == []


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [1, 8])
def test_all_checks_on_a_simulated_device(gpus: int, tmp_path: Path) -> None:
    end = on_simulated(gpus, "--budget", "3600", "--results", str(tmp_path / "results.jsonl"))
    assert end["said"] == {}
    real = [name for name, each in CHECKS.items() if each.real and each.needs <= gpus]
    many = [name for name, each in CHECKS.items() if each.needs > gpus]
    found = [end[key] for key in ("end", "unverified", "skipped", "left", "code")]
    assert found == ["green", real, many, [], 0]
