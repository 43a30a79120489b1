import gc
import os
import signal
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch.utils.data._utils import signal_handling

from multigpu_cli.config.schema import DataConfig
from multigpu_cli.data import fetcher
from multigpu_cli.data.fetcher import run_in_process
from multigpu_cli.data.loader import Loader
from multigpu_cli.errors import RequestError
from tests.data.test_loader import PLAN, Noisy, epoch, source
from tests.support import safe_forks
from tests.support.fork import exit_code, wait_for_end
from tests.support.world import CPU

LONG = "a-folder-with-a-long-name/" * 4  # as a scheduler's job folder: a Unix socket has room for 107 bytes in all


def loader(processes: int = 1) -> Loader:
    return Loader(Noisy(), source(Noisy()), DataConfig(num_workers=processes), device=CPU, seed=42)


def comes_up_late(trainer: int) -> Loader:
    def wait() -> None:
        while os.getppid() == trainer:
            time.sleep(0.01)

    os.register_at_fork(after_in_child=wait)
    return loader()


def is_stuck_at_its_start(_: int) -> Loader:
    reader, writer = os.pipe()

    def wait() -> None:
        os.write(writer, b"x")
        time.sleep(60)

    patch.object(signal_handling, "_set_worker_signal_handlers", wait).start()
    served = loader()
    os.read(reader, 1)
    return served


@pytest.mark.parametrize("begin", [comes_up_late, is_stuck_at_its_start])
def test_no_loader_outlives_a_trainer_that_was_killed(begin: Callable[[int], Loader]) -> None:
    """However late or stuck it is: torch's own watch takes whoever is the parent by then."""
    read, write = os.pipe()

    def trainer() -> None:
        me = os.getpid()
        os.register_at_fork(after_in_child=lambda: os.write(write, os.getpid().to_bytes(4)) and None)
        served = begin(me)
        os.kill(me, signal.SIGKILL)
        served.close()

    assert exit_code(trainer) == -signal.SIGKILL
    os.close(write)
    process = int.from_bytes(os.read(read, 4))
    try:
        wait_for_end(read, 12)
    finally:
        os.close(read)
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


@pytest.fixture
def long_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / LONG
    folder.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_loader_processes_work_with_a_long_tmpdir(long_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setattr(fetcher, "_SHORT", (short,))
        served = loader()
        try:
            (sockets,) = Path(short).iterdir()
            assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
            assert len(epoch(served, PLAN)) == PLAN.steps_per_epoch
            assert [path.is_socket() for path in sockets.iterdir()] == [True]
        finally:
            served.close()
        assert run_in_process(lambda: torch.ones(3)).tolist() == [1, 1, 1]
        assert not list(Path(short).iterdir())
    assert not list(long_folder.iterdir())


def test_a_loader_process_collects_no_garbage_of_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another loader's iterator, say, whose end in a process that did not start its workers prints a traceback."""

    class Left:
        def __del__(self) -> None:
            (tmp_path / str(os.getpid())).touch()

    monkeypatch.setattr(safe_forks, "gc", Mock())  # or that would leave it to the parent
    gc.disable()
    try:
        left: Any = Left()
        left.itself = left
        del left
        run_in_process(gc.collect)
        assert not list(tmp_path.iterdir())
        gc.collect()
        assert [path.name for path in tmp_path.iterdir()] == [str(os.getpid())]
    finally:
        gc.enable()


def nothing_writable(folder: str, mode: int) -> bool:
    return False


def test_where_no_path_is_short_enough_the_door_says_so(long_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", nothing_writable)
    with pytest.raises(RequestError, match=r"(?s)TMPDIR=.* is too long .* at most 75 bytes, or use --num-workers 0"):
        loader()
