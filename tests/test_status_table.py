"""The table of what was tested where takes real GPUs from what make gpu-check has recorded, and from nowhere else."""

import json
from pathlib import Path

import pytest

from tests.gpu.registry import CHECKS
from tests.support import generate_docs


def test_only_checks_that_passed_on_a_real_gpu_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, simulated = {"device": "NVIDIA H200", "simulated": False}, {"device": "NVIDIA H100", "simulated": True}
    lines = [
        {"check": "doctor", "verdict": "failed", "said": "", "machine": real},
        {"check": "doctor", "verdict": "passed", "machine": real},
        {"check": "dp-twice", "verdict": "passed", "machine": simulated},
        {"check": "compile", "verdict": "passed", "machine": real},  # one of three
        {"check": "batch-size-auto", "verdict": "passed", "machine": real},
        {"check": "batch-size-auto", "verdict": "failed", "said": "took 1", "machine": real},
    ]
    recorded = tmp_path / "results.jsonl"
    recorded.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    monkeypatch.setattr(generate_docs, "GPU_RESULTS", str(recorded))
    rows = {row.split(" | ")[0]: row for row in generate_docs.status_table().splitlines()}
    assert rows["| `doctor`"].endswith("| tested, NVIDIA H200 | not yet |")
    assert rows["| DataParallel (`dp`)"].endswith("| not yet | not yet |")
    assert rows["| `--compile`, fp32"].endswith("| not yet | not yet |")
    assert rows["| `--batch-size auto`"].endswith("| not yet | not yet |")
    assert "`batch-size-auto` (failed: took 1)" in generate_docs.status_table()
    assert "`fp32` (not run)" in generate_docs.status_table()
    one = sum(check.needs == 1 for check in CHECKS.values())
    assert generate_docs.tested_table().endswith(f"| 2 of {one} checks passed, NVIDIA H200 | not yet |")
    monkeypatch.setattr(generate_docs, "GPU_RESULTS", "nowhere.jsonl")
    assert generate_docs.tested_table().endswith("| not yet | not yet |")


def test_of_a_gpu_the_turns_of_the_newest_code_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def row(job: str, side: str, code: str, value: float) -> dict[str, object]:
        figures = {"peak_memory_bytes": 2**30, "launches": 7.0, "host_seconds": 0.002}
        return {"job": job, "side": side, "code": code, "value": value, **figures}

    turns = [row("har", "ours", "old", 1.0), *(row("har", "ours", "new", each) for each in (1.0, 80.0, 90.0))]
    other = [row("resnet50", "limit", "old", 5.0), {"job": "gpt2", "side": "ours", "code": "new", "error": "no"}]
    recorded = tmp_path / "figures.jsonl"
    recorded.write_text(
        "".join(f"{json.dumps(each)}\n" for each in [*turns, row("har", "limit", "new", 100.0), *other])
    )
    monkeypatch.setattr(generate_docs, "GPU_FIGURES", str(recorded))
    assert [line.split(" | ", 1)[1] for line in generate_docs.gpu_table().splitlines()[2:]] == [
        "– | ≥ 0.98 | – / 5 | – / 1 | – / 7 | – / 2 |",
        "0.8 | ≥ 0.9, missed | 80 / 100 | 1 / 1 | 7 / 7 | 2 / 2 |",
    ]


def test_the_checks_that_a_row_names_are_there() -> None:
    named = {name for feature in generate_docs.FEATURES for name in (*feature.one, *feature.several)}
    assert named <= set(CHECKS)
