"""The table of what was tested where takes real GPUs from what make gpu-check has recorded, and from nowhere else."""

import json
from pathlib import Path

import pytest

from tests.gpu.registry import CHECKS
from tests.support import generate_docs


def test_only_checks_that_passed_on_a_real_gpu_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, simulated = {"device": "NVIDIA H200", "simulated": False}, {"device": "NVIDIA H100", "simulated": True}
    lines = [
        {"check": "doctor", "verdict": "failed", "machine": real},
        {"check": "doctor", "verdict": "passed", "machine": real},
        {"check": "dp-twice", "verdict": "passed", "machine": simulated},
        {"check": "compile", "verdict": "passed", "machine": real},  # one of three
    ]
    recorded = tmp_path / "results.jsonl"
    recorded.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    monkeypatch.setattr(generate_docs, "GPU_RESULTS", str(recorded))
    rows = {row.split(" | ")[0]: row for row in generate_docs.status_table().splitlines()}
    assert rows["| `doctor`"].endswith("| tested, NVIDIA H200 | not yet |")
    assert rows["| DataParallel (`dp`)"].endswith("| not yet | not yet |")
    assert rows["| `--compile`"].endswith("| not yet | not yet |")
    assert "2 of " in generate_docs.tested_table()
    assert "on NVIDIA H200" in generate_docs.tested_table()
    monkeypatch.setattr(generate_docs, "GPU_RESULTS", "nowhere.jsonl")
    assert "| not yet |" in generate_docs.tested_table()


def test_the_checks_that_a_row_names_are_there() -> None:
    named = {name for feature in generate_docs.FEATURES for name in (*feature.one, *feature.several)}
    assert named <= set(CHECKS)
