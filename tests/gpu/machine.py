"""What a result is of: the device, torch, and the code that was checked."""

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def is_simulated() -> bool:
    """Whether the CUDA devices here are those of tests/gpu/simulated, whose kernels run on the CPU."""
    return bool(os.environ.get("SIMULATED_CUDA"))


def patience(seconds: float) -> float:
    """A time limit, which is longer where kernels run on the CPU."""
    return seconds * (5 if is_simulated() else 1)


def describe_machine() -> dict[str, Any]:
    """The machine, for the results; {} where torch sees no CUDA device."""
    import torch

    if not torch.cuda.is_available():
        return {}
    return {
        "device": torch.cuda.get_device_name(0),
        "devices": torch.cuda.device_count(),
        "simulated": is_simulated(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.partition(" ")[0],
        "code": code_mark("*.py", "multigpu_cli/**/*.py", "tests/gpu/**/*.py"),
    }


def code_mark(*patterns: str) -> str:
    """Changes whenever a file does that one of the patterns matches."""
    total = hashlib.sha256()
    for file in sorted({file for pattern in patterns for file in ROOT.glob(pattern)}):
        total.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return total.hexdigest()[:12]
