"""What each of four processes holds of a GPT with --multi-gpu fsdp: in bytes of tensors, and as the system counts."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launcher import TORCHRUN, start_command, wait_for_exit

pytestmark = pytest.mark.slow
WORKERS = 4


def measure(folder: Path, width: int, depth: int) -> list[dict[str, Any]]:
    """What the worker of each rank has written."""
    script = str(Path(__file__).with_name("memory_worker.py"))
    command = [*TORCHRUN, f"--nproc_per_node={WORKERS}", script, str(folder), str(width), str(depth)]
    result = wait_for_exit(start_command(command, folder), seconds=900)
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORKERS)]


def check_memory(found: list[dict[str, Any]]) -> None:
    """Weights, gradient and two moments: a part of all of it, and all of it for the largest group.

    A fifth more is for activations, and blocks on their way; a tenth for what the C library, torch and Python take.
    """
    for rank, held in enumerate(found):
        weights, largest = sum(held["groups"]), max(held["groups"])
        allowed = 4 * weights / WORKERS + 4 * largest
        assert held["tensors at rest"] < 1.02 * 3 * weights / WORKERS
        assert held["tensors"] < 1.2 * allowed
        assert held["training"] < 1.3 * allowed
        assert held["at rest"] < 1.4 * held["tensors at rest"]
        whole = weights if rank == 0 else weights / WORKERS
        assert held["building"] < whole + 5 * largest


def test_97_million_parameters(tmp_path: Path) -> None:
    found = measure(tmp_path, width=768, depth=12)
    assert sum(found[0]["groups"]) / 4 == pytest.approx(97.6e6, rel=0.01)
    check_memory(found)


@pytest.mark.alone
def test_700_million_parameters_on_one_machine(tmp_path: Path) -> None:
    """Planned, built, and run for two steps within 24 GiB, where one process alone would hold 11 GiB of state."""
    (line,) = (line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
    if (available := int(line.split()[1]) / 2**20) < 18:
        pytest.skip(f"{available:.1f} GiB of memory are free, and this takes 16")
    found = measure(tmp_path, width=1536, depth=24)
    assert sum(found[0]["groups"]) / 4 == pytest.approx(705e6, rel=0.01)
    assert found[0]["plan"][0].startswith("by 24 blocks (Block: blocks.0 … blocks.23) and the rest")
    assert found[0]["plan"][1].startswith("rank 0 builds the weights")
    check_memory(found)
