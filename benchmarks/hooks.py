"""What a hook that does nothing costs a step: our loop with one, against the same loop without, and a control.

    python -m benchmarks.hooks

`epoch_end` alone is called between steps; `after_backward` and `step_end` in each step, where they get tensors by name,
and for `step_end` the loss is reduced and read.
"""

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.paired_timing import Row, alternate, program
from benchmarks.step_overhead import assemble_training, iterate_steps
from benchmarks.workloads import MLP

_ENDLESS = "1000000"


class Empty:
    """Is called after each epoch, and so in no step."""

    def epoch_end(self, numbers: Any) -> None:
        """Nothing."""


class Gradients:
    """Is called in each step."""

    def after_backward(self, numbers: Any, tensors: Any) -> None:
        """Nothing."""


class Steps:
    """Is called after each step."""

    def step_end(self, numbers: Any, tensors: Any) -> None:
        """Nothing."""


def measure(tiny: bool = False) -> list[Row]:
    torch.set_num_threads(1)
    named = {"without": (), "control": (), "empty": ("Empty",), "gradients": ("Gradients",), "steps": ("Steps",)}
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as home, ExitStack() as stack:
        os.chdir(home)
        stack.callback(os.chdir, before)
        flags = MLP | {"epochs": _ENDLESS, "checkpoint_every": _ENDLESS}
        sides = {}
        for name, hooks in named.items():
            hook: dict[str, Any] = {"hook": [f"{__spec__.name}:{each}" for each in hooks]}
            steps = iterate_steps(assemble_training(flags | {"save_dir": name} | hook, stack))
            sides[name] = lambda steps=steps: next(steps)
        found = alternate(sides, 16 if tiny else 704)
    return [
        found.ratio("control: a step without a hook / itself", "control", "without"),
        found.ratio("a step with an empty hook / without", "empty", "without", aim=1.01),
        found.over("a step with an empty hook, over without", "empty", "without"),
        found.over("a step with an empty after_backward, over without", "gradients", "without"),
        found.over("a step with an empty step_end, over without", "steps", "without"),
    ]


if __name__ == "__main__":
    program(measure, __doc__)
