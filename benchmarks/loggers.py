"""What a logger costs a step while its server hangs: our loop with one, against the same loop without, and a control.

    python -m benchmarks.loggers

The logger's process connects to a server of this machine that accepts and never answers; the loop writes a journal line
every ten steps. All three loops are in this process and take turns, by the clock on the wall: what the process beside
takes from a step, on whatever core, counts.
"""

import os
import socket
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks.paired_timing import BLOCKS, Row, Seconds, program
from benchmarks.step_overhead import assembled, iterate_steps
from benchmarks.workloads import MLP
from multigpu_cli.monitor.loggers.position import read_position

_NAME = "benchmarks.loggers:Hanging"
_ADDRESS = "hanging-server"  # a socket in the working directory
_ENDLESS = "1000000"
_INTERVAL, _LINES = 10, 8  # steps a journal line, lines a turn


class Hanging:
    """A logger whose server never answers."""

    def open(self, run_id: str, config: dict[str, object]) -> None:
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(_ADDRESS)

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self._server.sendall(str(step).encode())
        self._server.recv(1)

    def close(self) -> None:
        self._server.close()


def measure(tiny: bool = False) -> list[Row]:
    torch.set_num_threads(1)
    lines, turns = (1, 2) if tiny else (_LINES, 4 * BLOCKS)
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as home, ExitStack() as stack:
        os.chdir(home)
        stack.callback(os.chdir, before)
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(_ADDRESS)
        server.listen()
        length = {"epochs": _ENDLESS, "checkpoint_every": _ENDLESS, "log_interval": str(_INTERVAL)}
        runs = {
            name: assembled(MLP | length | more | {"save_dir": name}, stack)
            for name, more in {"logger": {"logger": _NAME}, "without": {}, "control": {}}.items()
        }
        for run in runs.values():
            run.log.journal.write("start", plan={})  # what `start_run` does
        stack.enter_context(server.accept()[0])  # the process beside has loaded, and waits for an answer
        seconds, sides = Seconds(time.perf_counter), {name: iterate_steps(run) for name, run in runs.items()}
        for turn in range(turns + 1):
            for name, steps in sides.items():
                began = seconds.clock()
                for _ in range(_INTERVAL * lines):
                    next(steps)
                if turn:  # the first is warm-up, and loads TensorBoard
                    seconds.add(name, (seconds.clock() - began) / (_INTERVAL * lines))
        with open("logger/journal.jsonl", "rb") as journal:
            begun = len(journal.readline())  # the line of the start has no numbers
        if read_position(Path("logger"), _NAME).sent > begun:
            raise RuntimeError("the server has answered: nothing was measured")
    return [
        seconds.ratio("control: a step without a logger / itself", "control", "without"),
        seconds.ratio("a step beside a logger whose server hangs / without", "logger", "without", aim=1.01),
        seconds.over("a step beside a logger whose server hangs, over without", "logger", "without"),
    ]


if __name__ == "__main__":
    program(measure, __doc__)
