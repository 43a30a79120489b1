"""Real launches for the tests of several processes: torchrun, or the front door by itself."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FRONT_DOOR = str(ROOT / "main_multi_gpu.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
SECONDS = 150
ENVIRON = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support" / "site")]), "OMP_NUM_THREADS": "1"}


def options(values: Mapping[str, Any]) -> list[str]:
    """Keyword arguments as flags: True is a switch, a list is a repeated flag."""
    words: list[str] = []
    for name, value in values.items():
        for one in value if isinstance(value, list) else [value]:
            words += [f"--{name.replace('_', '-')}", *([] if one is True else [str(one)])]
    return words


def torchrun(processes: int, *words: str, script: str = FRONT_DOOR, restarts: int = 0, **flags: Any) -> list[str]:
    """The command line of a script under torchrun."""
    agent = [*TORCHRUN, f"--nproc_per_node={processes}", f"--max-restarts={restarts}"]
    return [*agent, script, *words, *options(flags)]


def alone(*words: str, **flags: Any) -> list[str]:
    """The command line of the front door without a launcher."""
    return [sys.executable, FRONT_DOOR, *words, *options(flags)]


def start_command(command: Sequence[str], folder: Path, **environ: str) -> subprocess.Popen[str]:
    """Start it in a folder, as the head of a process group of its own."""
    environment, pipe = os.environ | ENVIRON | environ, subprocess.PIPE
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


def wait_for_exit(process: subprocess.Popen[str], seconds: float = SECONDS) -> subprocess.CompletedProcess[str]:
    """Wait for its end, with all it said; whatever hangs is killed, children too."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run_command(command: Sequence[str], folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return wait_for_exit(start_command(command, folder, **environ))
