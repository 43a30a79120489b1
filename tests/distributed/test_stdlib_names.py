"""A working directory whose files are named as modules of Python's own: no process of ours imports them."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.forked import run_forked
from tests.distributed.launcher import alone, run_command

NAMES = ("multiprocessing", "socket", "json", "queue", "wave")
NET = """
import wave

from torch import nn


def build(num_classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))
"""
LOGGER = """
import json
import socket


class Recorder:
    def open(self, run_id, config): ...

    def log(self, step, numbers):
        with open("rows.jsonl", "a") as file:
            file.write(json.dumps([step, numbers]) + chr(10))

    def close(self): ...
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"open('imported', 'a').write('{name}'); raise RuntimeError('{name}')")
    (tmp_path / "own_net.py").write_text(NET)
    (tmp_path / "mailbox.py").write_text(LOGGER)  # what the command names may be called so
    return tmp_path


def test_a_self_launched_run_with_own_code_a_logger_and_a_mirror(folder: Path) -> None:
    flags: dict[str, Any] = {"multi_gpu": "ddp", "nproc_per_node": 2, "epochs": 1, "batch_size": 500}
    own = {"model": "own_net:build", "logger": "mailbox:Recorder", "mirror": "file:mirror", "save_dir": "run"}
    ended = run_command(alone(**flags, **own), folder)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
    assert (folder / "rows.jsonl").read_text()
    assert (folder / "mirror" / "last.pt").is_file()
    assert run_command(alone("status", "run"), folder).returncode == 0
    assert not (folder / "imported").exists()


@pytest.mark.parametrize("command", ["doctor", pytest.param("plan", marks=pytest.mark.slow)])
def test_commands_that_start_workers_of_their_own(folder: Path, command: str) -> None:
    ended = run_forked(alone(command, "--json"), folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert not (folder / "imported").exists()
