"""What monitoring costs: our loop with all of it at its defaults, against the same loop with all of it silent.

    python -m benchmarks.monitoring

Journal, TensorBoard, progress bar, console lines and meters; faults are watched on both sides. By the CPU time of all
threads of the process. A turn is a whole number of log intervals, so that each has its share of log lines: the short
turns of step_overhead would call those disturbances and leave them out.
"""

import os
import tempfile
import time
from contextlib import ExitStack, nullcontext
from typing import Any

import torch

from benchmarks.paired_timing import BLOCKS, Row, Seconds, program
from benchmarks.step_overhead import assemble_training, iterate_steps
from benchmarks.workloads import MLP, PICTURES
from multigpu_cli.config.schema import Config
from multigpu_cli.monitor.console import TqdmDisplay
from multigpu_cli.monitor.journal import Journal
from multigpu_cli.monitor.meters import StepTimer

_ENDLESS = 1_000_000
_JOBS = {
    "MLP, batch 32": (MLP, Config().log.interval, 8),  # steps a log line, log lines a turn
    "ResNet-8, batch 128, a line every 10 steps": (
        PICTURES | {"model": "benchmarks.workloads:resnet8", "batch_size": "128"},
        10,
        1,
    ),
}


class Silent(StepTimer):
    """Meters that measure nothing."""

    def step(self, samples: int) -> None:
        pass

    def start(self) -> None:
        super().start()
        self.data_wait: Any = nullcontext()


def measure(tiny: bool = False) -> list[Row]:
    torch.set_num_threads(1)
    return [row for name, job in _JOBS.items() for row in _compared(name, *job, tiny=tiny)]


def _compared(name: str, flags: dict[str, str], interval: int, windows: int, *, tiny: bool) -> list[Row]:
    interval = 2 if tiny else interval
    turns = 2 if tiny else 2 * BLOCKS
    length = {"epochs": str(_ENDLESS), "checkpoint_every": str(_ENDLESS)}
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other, ExitStack() as stack:
        on = assemble_training({**flags, **length, "log_interval": str(interval), "save_dir": one}, stack)
        off = assemble_training({**flags, **length, "log_interval": str(_ENDLESS), "save_dir": other}, stack)
        off.observer.timer, off.log.tensorboard, off.log.journal = Silent(), None, Journal(None)
        on.log.progress_bar = TqdmDisplay(on.plan.schedule.total_steps, 0, stack.enter_context(open(os.devnull, "w")))
        stack.callback(on.log.progress_bar.close)
        seconds, sides = Seconds(time.process_time), {"on": iterate_steps(on), "off": iterate_steps(off)}
        for turn in range(turns + 1):
            for side, steps in sides.items():
                began = seconds.clock()
                for _ in range(interval * windows):
                    next(steps)
                if turn:  # the first is warm-up, and loads TensorBoard
                    seconds.add(side, (seconds.clock() - began) / (interval * windows))
    return [
        seconds.ratio(f"monitoring on / off, {name}", "on", "off", aim=1.01 if "ResNet" in name else None),
        seconds.over(f"monitoring on over off, a step of {name}", "on", "off"),
    ]


if __name__ == "__main__":
    program(measure, __doc__)
