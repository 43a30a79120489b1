"""A GPU that can't go on: the run ends soon, with a report."""

import json
import time
from pathlib import Path
from typing import Any

from tests.gpu.front_door import ALONE, run, sets


def device_assert(folder: Path) -> dict[str, Any]:
    """An index out of range, which the device finds: from then on every call to CUDA fails."""
    return _assert_on_device(folder, *ALONE)


def device_assert_beside_nccl(folder: Path) -> dict[str, Any]:
    """NCCL's thread sees the error too, and must leave it to the report."""
    return _assert_on_device(folder, "--multi-gpu", "ddp", ranks=1)


def _assert_on_device(folder: Path, *flags: str, ranks: int = 0) -> dict[str, Any]:
    began = time.monotonic()
    done = run(
        folder,
        *flags,
        "--model",
        "tests.gpu.networks:at_pass",
        *sets("model.args.deed=assert", "model.args.at=20"),
        "--log-interval",
        "1",
        ranks=ranks,
        code=1,
    )
    seconds = time.monotonic() - began
    assert "device-side assert" in done.said, f"it says nothing of an assert: {done.said[-1000:]}"
    assert "CUDA_LAUNCH_BLOCKING=1" in done.said, f"it names no way out: {done.said[-1000:]}"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "failed", summary["status"]
    reports = sorted(folder.glob("logs/crash_*.txt"))
    return {"seconds_to_the_end": round(seconds, 1), "error": summary["error"][:200], "reports": len(reports)}
