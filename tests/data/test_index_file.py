"""The index of places when several processes ask for it at once, when one is killed, and when there is no room."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

_BUILD = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
from multigpu_cli.data.rows.store import open_index

def build(write):
    with open(sys.argv[1] + ".builds", "a") as builds:
        builds.write("x")
    for row in np.arange(20000).reshape(-1, 2):
        write(row)
    print("building", flush=True)
    time.sleep(float(sys.argv[2]))
    return {"n": 1}

index = open_index("test", [Path(sys.argv[1])], 2, build, "1")
print(int(index.rows.sum()), index.facts)
"""
_WHOLE = "199990000 {'n': 1}"


def start(file: Path, seconds: float) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", _BUILD, str(file), str(seconds)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """What is indexed, in a folder of its own."""
    path = tmp_path / "data" / "rows"
    path.parent.mkdir()
    path.write_text("rows")
    return path


def test_processes_that_ask_at_once_build_it_once(file: Path) -> None:
    processes = [start(file, 0.5) for _ in range(3)]
    found = [process.communicate(timeout=60)[0].splitlines()[-1] for process in processes]
    assert found == [_WHOLE] * 3
    assert Path(f"{file}.builds").read_text() == "x"


def test_a_killed_build_is_no_index_and_leaves_nothing_after_the_next(file: Path) -> None:
    killed = start(file, 60)
    assert killed.stdout is not None
    assert killed.stdout.readline() == "building\n"
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    assert len(list(file.parent.glob("*.draft"))) == 1
    assert not list(file.parent.glob(".multigpu-*.index"))
    assert start(file, 0).communicate(timeout=60)[0].splitlines()[-1] == _WHOLE
    assert sorted(each.suffix for each in file.parent.iterdir()) == ["", ".builds", ".index"]
