"""What a step pays for processes beside it: a logger whose server hangs, a mirror that gets checkpoints, an open page.

    python -m benchmarks.companions

Each against the same loop without, and a control. The logger's process connects to a server of this machine that
accepts and never answers; the loop writes a journal line every ten steps. The loops beside a mirror write checkpoints,
and the mirror is a folder on the same disk; a turn is long enough for several uploads, and what is still to be sent
after it is waited for off the clock. The page is `watch` on the run's folder; a third process asks it each second for
the list and for all of the run (a browser asks for one of them twice a second, and gets curves where lines are new).
All loops are in this process and take turns, by the clock on the wall: what the process beside takes from a step, on
whatever core, counts.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks.paired_timing import BLOCKS, ROOT, Row, Seconds, program
from benchmarks.step_overhead import assemble_training, iterate_steps
from benchmarks.workloads import MLP
from multigpu_cli.checkpoint.manifest import list_checkpoint_folders, parse_step
from multigpu_cli.loggers.sender import read_position
from multigpu_cli.mirror.follower import read_state
from multigpu_cli.run.run import Run

_NAME = "benchmarks.companions:Hanging"
_ADDRESS = "hanging-server"  # a socket in the working directory
_ENDLESS = "1000000"
_INTERVAL, _LINES = 10, 8  # steps a journal line, lines a turn
_PAGE_TURN = 2000  # steps: seconds, of which the page looks every one
_SAVED, _CHECKPOINTS = 500, 6  # steps a checkpoint, checkpoints a turn: seconds, of which the mirror looks every one


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
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as home:
        os.chdir(home)
        try:
            return [*_measure_logger(tiny), *_measure_mirror(tiny), *_measure_page(tiny)]
        finally:
            os.chdir(before)


def _measure_logger(tiny: bool) -> list[Row]:
    lines, turns = (1, 2) if tiny else (_LINES, 4 * BLOCKS)
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(_ADDRESS)
        server.listen()
        runs = _assemble({"logger": {"logger": _NAME}, "without": {}, "control": {}}, _ENDLESS, stack)
        stack.enter_context(server.accept()[0])  # the process beside has loaded, and waits for an answer
        seconds = _take_turns(runs, turns, _INTERVAL * lines)
        with open("logger/journal.jsonl", "rb") as journal:
            begun = len(journal.readline())  # the line of the start has no numbers
        if read_position(Path("logger"), _NAME).sent > begun:
            raise RuntimeError("the server has answered: nothing was measured")
    return [
        seconds.ratio("control: a step without a logger / itself", "control", "without"),
        seconds.ratio("a step beside a logger whose server hangs / without", "logger", "without", aim=1.01),
        seconds.over("a step beside a logger whose server hangs, over without", "logger", "without"),
    ]


def _measure_mirror(tiny: bool) -> list[Row]:
    every, steps, turns = (2, 4, 1) if tiny else (_SAVED, _SAVED * _CHECKPOINTS, BLOCKS)
    with ExitStack() as stack:
        sides = {"mirror": {"mirror": "file:copy"}, "unmirrored": {}, "unmirrored again": {}}
        runs = _assemble(sides, str(every), stack)
        for begin in runs["mirror"].moments.start:
            begin(runs["mirror"], stack)
        seconds = _take_turns(runs, turns, steps, settle=lambda: _wait_for_mirror(Path("mirror")))
    return [
        seconds.ratio(
            "control: a step between checkpoints without a mirror / itself", "unmirrored again", "unmirrored"
        ),
        seconds.ratio("a step beside a mirror that is sent checkpoints / without", "mirror", "unmirrored", aim=1.01),
        seconds.over("a step beside a mirror that is sent checkpoints, over without", "mirror", "unmirrored"),
    ]


_READER = """
import json, sys, time, urllib.request
address, token = sys.argv[1].strip().split("?")
ask = lambda path: json.load(urllib.request.urlopen(f"{address}{path}{token}"))
while True:
    rows = ask("runs?")["runs"]
    ask(f"view?run={rows[0]['id']}&")
    print("seen", flush=True)
    time.sleep(1)
"""


def _measure_page(tiny: bool) -> list[Row]:
    steps, turns = (20, 2) if tiny else (_PAGE_TURN, 2 * BLOCKS)
    with ExitStack() as stack:
        runs = _assemble({"watched": {}, "alone": {}, "alone again": {}}, _ENDLESS, stack)
        server = _start(stack, "-m", "multigpu_cli", "watch", "watched")
        reader = _start(stack, "-c", _READER, server.stdout.readline())  # type: ignore[union-attr]
        if not reader.stdout.readline():  # type: ignore[union-attr]
            raise RuntimeError("the page does not answer: nothing was measured")
        seconds = _take_turns(runs, turns, steps)
        if reader.poll() is not None:
            raise RuntimeError("the reader of the page has ended: not all was measured")
    return [
        seconds.ratio("control: a step without a page / itself", "alone again", "alone"),
        seconds.ratio("a step beside an open page / without", "watched", "alone", aim=1.01),
        seconds.over("a step beside an open page, over without", "watched", "alone"),
    ]


def _start(stack: ExitStack, *arguments: str) -> subprocess.Popen[str]:
    """A Python process that the stack ends; its output is read line by line."""
    environ = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True, env=environ)
    stack.enter_context(process)
    stack.callback(process.kill)
    return process


def _assemble(sides: Mapping[str, dict[str, str]], every: str, stack: ExitStack) -> dict[str, Run]:
    flags = MLP | {"epochs": _ENDLESS, "checkpoint_every": every, "log_interval": str(_INTERVAL)}
    runs = {name: assemble_training(flags | more | {"save_dir": name}, stack) for name, more in sides.items()}
    for run in runs.values():
        run.log.journal.write("start", plan=run.plan.as_dict())  # as `start_run` does
    return runs


def _take_turns(runs: Mapping[str, Run], turns: int, steps: int, settle: Callable[[], None] = lambda: None) -> Seconds:
    """Let each run take so many steps, in turn; what `settle` waits for after each turn is not counted."""
    seconds, sides = Seconds(time.perf_counter), {name: iterate_steps(run) for name, run in runs.items()}
    for turn in range(turns + 1):
        for name, side in sides.items():
            began = seconds.clock()
            for _ in range(steps):
                next(side)
            if turn:  # the first is warm-up, and loads TensorBoard
                seconds.add(name, (seconds.clock() - began) / steps)
            runs[name].checkpointer.writer.wait()
            settle()
    return seconds


def _wait_for_mirror(run: Path) -> None:
    """Until the newest checkpoint has arrived."""
    until = time.monotonic() + 60
    newest = max(map(parse_step, list_checkpoint_folders(run / "checkpoints")), default=-1)
    while read_state(run).step != newest:
        if time.monotonic() > until:
            raise RuntimeError(f"the mirror does not follow: {read_state(run)}")
        time.sleep(0.05)


if __name__ == "__main__":
    program(measure, __doc__)
