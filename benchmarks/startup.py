"""CPU seconds from the start of a process to an answer or to the first optimizer step, and memory at its peak.

    python -m benchmarks.startup

Every figure is that of whole processes, ours and the hand-written script's in turn.
"""

import os
import subprocess
import sys
import tempfile

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.jobs import FEATURES, MLP, mlp
from benchmarks.pairs import ONE_THREAD, ROOT, Row, Spent, program, row, spent

_FRONT_DOOR = "main_multi_gpu.py"
_IMPORTING = """
import gc, time
gc.disable()
began = time.process_time()
import torch
then = time.process_time()
import train_multi_gpu
print(then - began, time.process_time() - then)
"""


def mlp_of_one_step() -> nn.Module:
    """The MLP; the process ends with its first optimizer step."""
    register_optimizer_step_post_hook(lambda *_: os._exit(0))
    return mlp((FEATURES,))


def measure(tiny: bool = False) -> list[Row]:
    times = 1 if tiny else 5
    return [*_answers(times), *_imports(times), *_first_step(times), *_memory(1 if tiny else 3, 40 if tiny else 400)]


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
    theirs, ours = [], []
    for _ in range(times):
        done = subprocess.run(
            [sys.executable, "-c", _IMPORTING], cwd=ROOT, env=os.environ | ONE_THREAD, check=True, capture_output=True
        )
        torch_alone, rest = map(float, done.stdout.split())
        theirs.append(torch_alone)
        ours.append(rest)
    return [row("import torch, CPU", theirs, unit="s"), row("our imports over torch's, CPU", ours, unit="s", aim=0.10)]


def _run(*flags: str) -> Spent:
    """A run of ours in a folder that goes away."""
    given = [word for key, value in MLP.items() for word in (f"--{key.replace('_', '-')}", value)]
    with tempfile.TemporaryDirectory() as folder:
        return spent([_FRONT_DOOR, *given, "--save-dir", folder, "--multi-gpu", "none", *flags])


def _first_step(times: int) -> list[Row]:
    theirs, ours = [], []
    for _ in range(times):
        theirs.append(spent(["-m", "benchmarks.by_hand", "1"]).cpu)
        ours.append(_run("--model", "benchmarks.startup:mlp_of_one_step").cpu)
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    return [
        row("hand-written script to its first step, CPU", theirs, unit="s"),
        row("first step: ours / hand-written", ratios, aim=1.08),
    ]


def _memory(times: int, steps: int) -> list[Row]:
    theirs, ours = [], []
    for _ in range(times):
        theirs.append(spent(["-m", "benchmarks.by_hand", str(steps)]).peak)
        ours.append(_run("--max-steps", str(steps), "--epochs", "1000", "--quiet").peak)
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    return [
        row("hand-written script, peak memory", [peak / 2**20 for peak in theirs], unit="MiB"),
        row("peak memory: ours / hand-written", ratios, aim=1.03),
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    program(measure, __doc__)
