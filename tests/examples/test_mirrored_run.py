"""The example of a mirror: killed on two workers, without its folder, and resumed on one."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from multigpu_cli.checkpoint.manifest import MANIFEST
from multigpu_cli.mirror.follower import read_state

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "mirrored_run.sh"


def start(folder: Path, workers: int, *more: str) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    environ = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = ["bash", str(SCRIPT), str(workers), "file:mirror", "--batch-size", "2", "--quiet", *more]
    return subprocess.Popen(command, cwd=folder, env=environ, start_new_session=True)


def train(folder: Path, workers: int) -> str:
    assert start(folder, workers).wait(timeout=240) == 0
    return str(json.loads((folder / "checkpoints/mirrored/summary.json").read_text())["fingerprint"])


def test_it_has_at_most_thirty_lines() -> None:
    assert len(SCRIPT.read_text().splitlines()) <= 30


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The fingerprint of the run that nothing interrupts; many small passes, so that the kill comes in time."""
    return train(tmp_path_factory.mktemp("whole"), 1)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_killed_without_its_folder_and_resumed_on_another_number_of_workers(
    before: int, after: int, tmp_path: Path, whole: str
) -> None:
    broken, run = start(tmp_path / "broken", before), tmp_path / "broken" / "checkpoints" / "mirrored"
    until = time.monotonic() + 240
    while not list((tmp_path / "broken" / "mirror").glob(f"checkpoints/*/{MANIFEST}")):
        assert time.monotonic() < until
        time.sleep(0.05)
    os.killpg(broken.pid, signal.SIGKILL)
    broken.wait()
    while not read_state(run).complete:  # the process of the killed run sends its last checkpoint
        assert time.monotonic() < until
        time.sleep(0.05)
    shutil.rmtree(run)
    resumed = train(tmp_path / "broken", after)
    events = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    assert [event["from_world_size"] for event in events if event["event"] == "resume"] == [before]
    assert resumed == whole
