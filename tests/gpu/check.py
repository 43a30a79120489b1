"""`make gpu-check`: trains the embedded digits in every way that needs a GPU, one line each; exit code 0 if all passed.

Uses the python3 it is run with and installs nothing. Without CUDA it says what it skipped.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
FRONT_DOOR = str(ROOT / "main_multi_gpu.py")
FLAGS = ["--epochs", "6", "--json"]
GOOD_ENOUGH = 0.93  # test accuracy that six epochs reach with room to spare; a broken path stays far below


def front_door(folder: Path, *flags: str, torchrun: int = 0) -> dict[str, Any]:
    """Run the command line and return its summary; with `torchrun`, in so many processes."""
    launcher = [sys.executable]
    if torchrun:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={torchrun}"]
    return finished([*launcher, FRONT_DOOR, *FLAGS, *flags, "--save-dir", str(folder)])


def finished(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise AssertionError(f"exit code {done.returncode}: {done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def two_ranks_on_one_gpu(folder: Path) -> dict[str, Any]:
    """Two gloo processes share GPU 0; two nccl ranks could not."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    return finished([*command, __file__, "shared-gpu", str(folder)])


def data_parallel_twice(folder: Path) -> dict[str, Any]:
    """DataParallel over [0, 0], built directly: the front door refuses to name a GPU twice."""
    return finished([sys.executable, __file__, "dp-twice", str(folder)])


def on_and_beside(folder: Path) -> dict[str, Any]:
    """Batches that a stream of their own brings in time are those that lie on the GPU."""
    flags = ("--multi-gpu", "none", "--exact", "--data-on-device")
    beside, there = (front_door(folder / word, *flags, word) for word in ("off", "on"))
    if beside["fingerprint"] != there["fingerprint"]:
        raise AssertionError(f"fingerprints {beside['fingerprint']} and {there['fingerprint']}")
    return there


def in_this_process(kind: str, folder: Path) -> None:
    """Run the engine on devices that the front door would not choose."""
    import torch

    from multigpu_cli import engine
    from multigpu_cli.config.sources import resolve
    from multigpu_cli.monitor.console import Console
    from multigpu_cli.runtime.devices import Choice
    from multigpu_cli.runtime.world import Rendezvous

    gpu = torch.device("cuda", 0)
    meeting = Rendezvous.from_environment(os.environ)
    choice = (
        Choice("ddp", (gpu,), 0, "two gloo ranks on one GPU", backend="gloo")
        if kind == "shared-gpu"
        else Choice("dp", (gpu, gpu), 0, "DataParallel over [0, 0]")
    )
    config = resolve({"epochs": "6", "save_dir": str(folder)}, [], None)
    console = Console("silent" if meeting and meeting.rank else "normal", json=True)
    engine.run(config, choice, meeting, console, last_words=lambda error: console.error(str(error)))


CHECKS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "single GPU, bf16": lambda folder: front_door(folder, "--multi-gpu", "none", "--amp", "bf16"),
    "single GPU, fp16 with GradScaler": lambda folder: front_door(folder, "--multi-gpu", "none", "--amp", "fp16"),
    "DDP over nccl, one process": lambda folder: front_door(folder, "--multi-gpu", "ddp", torchrun=1),
    "DDP over gloo, two processes on one GPU": two_ranks_on_one_gpu,
    "DataParallel over [0, 0]": data_parallel_twice,
    "data on the GPU and beside it, same bits": on_and_beside,
    "torch.compile": lambda folder: front_door(folder, "--multi-gpu", "none", "--compile", "default"),
    "gradient checkpointing, accumulation 2": lambda folder: front_door(
        folder, "--multi-gpu", "none", "--grad-checkpointing", "--grad-accum-steps", "2"
    ),
}


def main() -> int:
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device here; skipped:", *CHECKS, sep="\n  ")
        return 0
    print(f"torch {torch.__version__} on {torch.cuda.get_device_name()}", flush=True)
    failed = 0
    for name, check in CHECKS.items():
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = check(Path(folder, "run"))
                accuracy = found["final"]["test_accuracy"]
                good = found["status"] == "completed" and accuracy >= GOOD_ENOUGH
                said = f"test accuracy {accuracy:.1%}, {found['samples_per_second']:,.0f} samples/s"
            except (AssertionError, subprocess.TimeoutExpired) as error:
                good, said = False, str(error)
        failed += not good
        print(f"{'ok  ' if good else 'FAIL'} {name}: {said} ({time.perf_counter() - began:.0f} s)", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    if len(sys.argv) > 2:
        in_this_process(sys.argv[1], Path(sys.argv[2]))
        sys.stdout.flush()
        os._exit(0)  # past torch's exit, where gloo now and then aborts a run that is done
    sys.exit(main())
