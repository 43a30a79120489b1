"""CPU seconds from the start of a process to an answer or to the first optimizer step, and memory at its peak.

    python -m benchmarks.startup

Every figure is that of whole processes, ours and the hand-written script's in turn. Both run from the bytecode that
pip leaves as it installs, and Python at the first start in a checkout; PYTHONDONTWRITEBYTECODE has no say here.
"""

import compileall
import os
import subprocess
import sys
import tempfile
from typing import Literal

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.paired_timing import ONE_THREAD, ROOT, Row, Spent, program, row, spent
from benchmarks.workloads import FEATURES, MLP, mlp
from multigpu_cli.models.networks.convnet import ConvNet, resnet18

_FRONT_DOOR = "main_multi_gpu.py"
_IMPORTING = """
import gc, sys, time
gc.disable()
began = time.process_time()
import torch
if sys.argv[1:]:
    sys.pycache_prefix = sys.argv[1]
then = time.process_time()
import train_multi_gpu
print(then - began, time.process_time() - then)
"""


def mlp_of_one_step() -> nn.Module:
    """The MLP; the process ends with its first optimizer step."""
    register_optimizer_step_post_hook(lambda *_: os._exit(0))
    return mlp((FEATURES,))


def picture_network_of_one_step(
    input_shape: tuple[int, ...], num_classes: int, network: Literal["convnet", "resnet18"]
) -> nn.Module:
    """A built-in network; the process ends with its first optimizer step."""
    register_optimizer_step_post_hook(lambda *_: os._exit(0))
    return ConvNet(input_shape, num_classes) if network == "convnet" else resnet18(input_shape, num_classes)


def measure(tiny: bool = False) -> list[Row]:
    _keep_bytecode()
    times = 1 if tiny else 5
    parts = [_answers(times), _imports(times), _first_step(times), _guard(times)]
    return [*(each for part in parts for each in part), *_memory(1 if tiny else 3, 40 if tiny else 400)]


def _keep_bytecode() -> None:
    for path in ROOT.glob("*.py"):
        compileall.compile_file(path, quiet=1)
    for room in ("benchmarks", "multigpu_cli"):
        compileall.compile_dir(ROOT / room, quiet=1)


def _answers(times: int) -> list[Row]:
    asked = {"--help": (["--help"], 0), "a usage error": (["--batch-size", "many"], 2)}
    return [
        row(
            f"{name}, CPU",
            [spent([_FRONT_DOOR, *words], code=code).cpu for _ in range(times)],
            unit="s",
            aim=0.25,
        )
        for name, (words, code) in asked.items()
    ]


def _imports(times: int) -> list[Row]:
    """As the front door imports: without garbage collection. Both are timed within one process."""
    theirs, ours, compiling = [], [], []
    with tempfile.TemporaryDirectory() as empty:
        for _ in range(times):
            torch_alone, rest = _importing()
            theirs.append(torch_alone)
            ours.append(rest)
            compiling.append(_importing(empty)[1])
    return [
        row("import torch, CPU", theirs, unit="s"),
        row("our imports over torch's, CPU", ours, unit="s", aim=0.10),
        row("the same without bytecode, CPU", compiling, unit="s"),
    ]


def _importing(*bytecode: str) -> tuple[float, float]:
    """Seconds of torch, and of ours, whose bytecode is looked for in another folder if one is given."""
    environ = os.environ | ONE_THREAD | {"PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", _IMPORTING, *bytecode]
    done = subprocess.run(command, cwd=ROOT, env=environ, check=True, capture_output=True)
    torch_alone, rest = map(float, done.stdout.split())
    return torch_alone, rest


def _run(*flags: str) -> Spent:
    """A run of ours in a folder that goes away."""
    given = [word for key, value in MLP.items() for word in (f"--{key.replace('_', '-')}", value)]
    with tempfile.TemporaryDirectory() as folder:
        return spent([_FRONT_DOOR, *given, "--save-dir", folder, "--multi-gpu", "none", *flags])


def _first_step(times: int) -> list[Row]:
    theirs, ours = [], []
    for _ in range(times):
        theirs.append(spent(["-m", "benchmarks.reference_loop", "1"]).cpu)
        ours.append(_run("--model", "benchmarks.startup:mlp_of_one_step").cpu)
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    return [
        row("hand-written script to its first step, CPU", theirs, unit="s"),
        row("first step: ours / hand-written", ratios, aim=0.54),
    ]


def _guard(times: int) -> list[Row]:
    """The guard's part of the time to the first step, which includes the import of torch."""
    rows = []
    for network in ("convnet", "resnet18"):
        seconds: dict[str, list[float]] = {"on": [], "off": []}
        for _ in range(times):
            for guard, measured in seconds.items():
                flags = ["--data", "digits", "--model", "benchmarks.startup:picture_network_of_one_step"]
                flags += ["--set", f"model.network={network}", "--set", f"guard={guard}"]
                measured.append(_run(*flags).cpu)
        ratios = [with_guard / without for with_guard, without in zip(seconds["on"], seconds["off"], strict=True)]
        rows.append(row(f"first step of {network}: with the guard / without", ratios, aim=1.05))
    return rows


def _memory(times: int, steps: int) -> list[Row]:
    theirs, ours = [], []
    for _ in range(times):
        theirs.append(spent(["-m", "benchmarks.reference_loop", str(steps)]).peak)
        ours.append(_run("--max-steps", str(steps), "--epochs", "1000", "--quiet").peak)
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    return [
        row("hand-written script, peak memory", [peak / 2**20 for peak in theirs], unit="MiB"),
        row("peak memory: ours / hand-written", ratios, aim=0.88),
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    program(measure, __doc__)
