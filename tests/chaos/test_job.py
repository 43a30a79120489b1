import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos import job
from tests.chaos.job import MARK, end_all, find_left_processes, is_held, processes, progress, worker


@pytest.fixture
def marked() -> Iterator[Callable[..., int]]:
    """Starts processes that carry a mark; they are gone afterwards."""
    started = []

    def start(code: str = "import time; print(flush=True); time.sleep(60)", **environment: str) -> int:
        process = subprocess.Popen(
            [sys.executable, "-c", code], env=os.environ | {MARK: "a-test"} | environment, stdout=subprocess.PIPE
        )
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process.pid

    yield start
    end_all("a-test")
    for process in started:
        process.communicate()


def test_a_process_left_behind_is_seen_and_ended(marked: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "GONE", 0.1)
    assert find_left_processes("a-test") == []
    orphan = marked(code="import os; os.setsid(); import time; print(flush=True); time.sleep(60)")
    assert find_left_processes("a-test") == [orphan]
    assert find_left_processes("another") == []
    end_all("a-test")
    assert find_left_processes("a-test") == []


def test_a_worker_is_found_and_not_its_loaders(marked: Callable[..., int]) -> None:
    forks = "import os, time; os.fork() and print(flush=True); time.sleep(60)"
    rank = marked(code=forks, RANK="1")
    assert len(list(processes("a-test"))) == 2
    assert (worker("a-test", 1), worker("a-test", 0)) == (rank, None)


def test_a_lock_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "GONE", 0.1)
    assert not is_held(tmp_path)
    with open(tmp_path / ".lock", "w") as file:
        assert not is_held(tmp_path)
        fcntl.flock(file, fcntl.LOCK_EX)
        assert is_held(tmp_path)


def test_progress_counts_attempts_and_steps_of_the_last(tmp_path: Path) -> None:
    assert progress(tmp_path) == (0, 0)
    lines = [{"event": event} for event in ("start", "train", "train", "start", "train", "eval")]
    (tmp_path / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert progress(tmp_path) == (2, 1)
