"""Checks to try the runner with; none needs torch."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STARTED = "GPU_CHECK_STARTED"  # names a file that tells the process which `hangs` has started


def passes(folder: Path) -> dict[str, Any]:
    return {"empty": not any(folder.iterdir()), "process": os.getpid()}


def fails(folder: Path) -> dict[str, Any]:
    raise AssertionError("one is not two")


def breaks(folder: Path) -> dict[str, Any]:
    raise RuntimeError("CUDA error: unspecified launch failure")


def dies(folder: Path) -> dict[str, Any]:
    print("a last word", flush=True)
    os._exit(3)


def hangs(folder: Path) -> dict[str, Any]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    Path(os.environ[STARTED]).write_text(str(process.pid))
    time.sleep(300)
    return {}
