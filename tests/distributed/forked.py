"""Launches from a fork of the running test, which has torch already; their workers are new processes, or forks too."""

import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import torch.distributed.run
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

import main_multi_gpu
from tests.distributed.launcher import ENVIRON, FRONT_DOOR, SECONDS, TORCHRUN, wait_for_exit
from tests.support.fork import write_output_to


class Forked:
    """A launch in a fork, with what `wait_for_exit` and its callers need of a Popen."""

    def __init__(self, command: Sequence[str], folder: Path, forked_workers: int, environ: dict[str, str]) -> None:
        self._out, self._err = (tempfile.TemporaryFile("w+") for _ in range(2))  # noqa: SIM115 - see communicate
        self.args, words = command, (list(command), folder, environ, self._out, self._err, forked_workers)
        self._process = get_context("fork").Process(target=_act, args=words)
        self._process.start()
        self.pid, self.kill, self._said = self._process.pid, self._process.kill, ("", "")

    def poll(self) -> int | None:
        return self._process.exitcode

    returncode = property(poll)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.args, SECONDS)
        if not self._out.closed:
            for file in (self._out, self._err):
                file.seek(0)
            self._said = self._out.read(), self._err.read()
            self._out.close()
            self._err.close()
        return self._said


def start_forked(command: Sequence[str], folder: Path, *, forked_workers: int = 0, **environ: str) -> Any:
    """As `start_command`: what the front door or torchrun does with these words; its first workers may be forks."""
    return Forked(command, folder, forked_workers, environ)


def run_forked(command: Sequence[str], folder: Path, **more: Any) -> subprocess.CompletedProcess[str]:
    return wait_for_exit(start_forked(command, folder, **more))


def _act(
    command: list[str], folder: Path, environ: dict[str, str], out: IO[str], err: IO[str], forked_workers: int
) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ.update(ENVIRON | environ)
    write_output_to(out, err)
    sys.argv = command[1:]
    _fork_workers(forked_workers)
    try:
        if command[1] == FRONT_DOOR:
            main_multi_gpu.leave(main_multi_gpu.run(command[2:]))
        torch.distributed.run.main(command[TORCHRUN.index("--standalone") :])
        main_multi_gpu.leave(0)
    except BaseException:
        traceback.print_exc()
        main_multi_gpu.leave(1)


def _fork_workers(count: int) -> None:
    """Have these wait for what the agent would start: once its store is open, see run_training.py, nothing may fork."""
    fork, waiting = get_context("fork"), []
    for _ in range(count):
        reader, writer = fork.Pipe(duplex=False)
        process = fork.Process(target=_work, args=(reader, writer))
        process.start()
        reader.close()
        waiting.append((process, writer))

    def start(_: SubprocessHandler, words: Sequence[str], environ: dict[str, str]) -> Any:
        process, writer = waiting.pop(0)
        writer.send((words, environ))
        return process._popen  # type: ignore[attr-defined]  # which can do what the agent needs

    if count:
        SubprocessHandler._popen = start  # type: ignore[assignment, method-assign]


def _work(reader: Connection, writer: Connection) -> None:
    writer.close()
    os.setsid()
    try:
        words, environ = reader.recv()
    except EOFError:  # nobody needs it
        os._exit(0)
    os.environ.clear()
    os.environ.update(environ)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    sys.argv = list(words[words.index(FRONT_DOOR) :])
    main_multi_gpu.main()
