"""A file of settings from somebody else: the plan names what it imports and where it sends the run."""

import json
from pathlib import Path
from typing import Any

import pytest

from multigpu_cli.monitor import journal
from tests.distributed.forked import run_forked
from tests.distributed.launcher import alone

THEIRS = """
data: tests.support.user_code:tensors
model: {name: tests.support.user_code:net, args: {norm: false}}
batch_size: 20
max_steps: 2
hook: theirs:Hook
logger: tests.support.recording_logger:Recorder
mirror: file:their_mirror
"""
CODE = """
class Hook:
    def end(self, summary):
        pass
"""
TOLD = (
    "--config theirs.yaml: --data tests.support.user_code:tensors, --model tests.support.user_code:net, "
    "--hook theirs:Hook, --logger tests.support.recording_logger:Recorder, --mirror file:their_mirror"
)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "theirs.yaml").write_text(THEIRS)
    (tmp_path / "theirs.py").write_text(CODE)
    return tmp_path


def read_row(printed: str) -> str:
    """The row of the plan, whose lines are wrapped."""
    lines = [line.strip(" │") for line in printed.splitlines()]
    first = next(number for number, line in enumerate(lines) if line.startswith("from files"))
    last = next(number for number, line in enumerate(lines) if line.startswith("starts"))
    return " ".join(line.removeprefix("from files").strip() for line in lines[first:last])


def test_the_plan_names_what_only_a_file_asks_for(here: Path) -> None:
    flags: dict[str, Any] = {"config": "theirs.yaml", "save_dir": "run"}
    tried = run_forked(alone("--dry-run", "--json", **flags), here)
    assert json.loads(tried.stdout)["from_files"] == TOLD, tried.stderr
    command = alone(multi_gpu="ddp", nproc_per_node=2, **flags)
    launched = run_forked(command, here, forked_workers=2, COLUMNS="400")
    assert read_row(launched.stdout) == TOLD, launched.stderr
    started = next(event for event in journal.read_events(here / "run/journal.jsonl") if event["event"] == "start")
    assert started["plan"]["from_files"] == TOLD
    resumed = run_forked(alone(save_dir="run", own_code=True, max_steps=3), here, COLUMNS="400")
    assert read_row(resumed.stdout) == TOLD.replace("--config theirs.yaml", "run"), resumed.stderr
