"""Which weights of a run are the best."""

from pathlib import Path
from typing import Any

import pytest

from multigpu_cli.monitor.journal import read_events
from tests.support.run_training import run_training


@pytest.mark.parametrize("which", ["min", "max"])
def test_best_is_what_the_flag_says(which: str, tmp_path: Path) -> None:
    flags: dict[str, Any] = {
        "save_dir": str(tmp_path),
        "batch_size": 20,
        "epochs": 3,
        "lr": 0.01,
        "best": f"val_loss:{which}",
    }
    ended = run_training(1, **flags)
    events = [event for event in read_events(tmp_path / "journal.jsonl") if event["event"] == "eval"]
    losses = [event["loss"] for event in events if event["split"] == "val"]
    assert len(set(losses)) == 3
    assert ended.summary["best"]["val_loss"] == {"min": min, "max": max}[which](losses)
