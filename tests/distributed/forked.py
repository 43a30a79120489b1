"""Launches from a fork of the running test, which has torch already; their workers are new processes as ever."""

import gc
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import IO

import torch.distributed.run

import main_multi_gpu
from tests.distributed.launcher import ENVIRON, FRONT_DOOR, SECONDS, TORCHRUN


def run_forked(command: Sequence[str], folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """As `run_command`: what the front door or torchrun does with these words."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 dislikes forks beside torch's threads
        process = get_context("fork").Process(target=_act, args=(list(command), folder, environ, out, err))
        process.start()
        process.join(SECONDS)
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
            raise subprocess.TimeoutExpired(command, SECONDS)
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(command, process.exitcode, out.read(), err.read())


def _act(command: list[str], folder: Path, environ: dict[str, str], out: IO[str], err: IO[str]) -> None:
    gc.freeze()  # as in ranks.py
    os.setsid()
    os.chdir(folder)
    os.environ.update(ENVIRON | environ)
    for number, file in ((1, out), (2, err)):
        os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr, sys.argv = out, err, command[1:]
    try:
        if command[1] == FRONT_DOOR:
            main_multi_gpu.leave(main_multi_gpu.run(command[2:]))
        torch.distributed.run.main(command[TORCHRUN.index("--standalone") :])
        main_multi_gpu.leave(0)
    except BaseException:
        traceback.print_exc()
        main_multi_gpu.leave(1)
