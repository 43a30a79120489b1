"""What a stranger plants beside a run or in its journal: nothing is written through it, and pages hold it as text."""

import json
import re
from pathlib import Path

import pytest

import main_multi_gpu
from tests.commands.runs import interrupted_run
from tests.support.run_training import run_training

MARKUP = "</script><script>alert(1)</script><!--\u2028\u2029{{SCRIPT}}{{DATA}}]]>\x00"

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("entry", ["step_00000001", "checkpoints", "config.yaml", "journal.jsonl", "best.pt"])
def test_mirror_writes_nothing_through_planted_links(entry: str, tmp_path: Path) -> None:
    mirror, precious = tmp_path / "mirror", tmp_path / "precious"
    (mirror / "checkpoints").mkdir(parents=True)
    precious.mkdir()
    (precious / "state.pt").write_text("untouched")
    link = mirror / "checkpoints" / entry if entry.startswith("step") else mirror / entry
    if entry == "checkpoints":
        link.rmdir()
    link.symlink_to(precious if link.suffix == "" else precious / "state.pt")
    run_training(max_steps=6, checkpoint_every=2, keep=1, mirror=f"file:{mirror}", save_dir=str(tmp_path / "run"))
    assert (precious / "state.pt").read_text() == "untouched"


def test_exported_page_holds_markup_of_a_journal_as_text(tmp_path: Path) -> None:
    run, page = interrupted_run(tmp_path / "runs/a"), tmp_path / "page.html"
    events = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    for event in events:
        if event["event"] == "start":
            event["host"] = MARKUP
            event["plan"] |= dict.fromkeys(("contents", "because", "strategy", "device"), MARKUP)
        event[MARKUP] = 0.5
    (run / "journal.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert main_multi_gpu.run(["watch", str(tmp_path / "runs"), "--export", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "alert(1)</script>" not in text
    assert len(re.findall("<script", text)) == 2
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])
