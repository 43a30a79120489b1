"""`make gpu-bench` whole on a simulated GPU: the paths are real, the rates mean nothing."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.gpu_workloads import jobs
from benchmarks.paired_timing import ROOT
from tests.gpu.simulated import build
from tests.gpu.simulated.machine import Machine

COMPILED = {
    "gpt2-compiled",
    "har-compiled",
}  # torch.compile for CUDA is Triton's, which is not simulated: the job is left out


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [1, 8])
def test_it_comes_to_its_end_and_has_nothing_to_do_a_second_time(
    tmp_path: Path, real_data: Callable[[str], Path], gpus: int
) -> None:
    try:
        build.build_library()
    except build.NoCompiler as missing:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(missing))
    words = ["--tiny", "--turns", "1", "--into", str(tmp_path / "rows.jsonl"), "--data", str(real_data("har").parent)]
    found = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu", *words],
            cwd=ROOT,
            env=Machine.of(gpus).environment(os.environ),
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, done.stderr
        found.append([json.loads(line) for line in done.stdout.splitlines()])
    rows = [each for each in found[0] if "job" in each]
    assert [(each["job"], each["side"]) for each in rows] == [
        (name, s) for name, job in jobs().items() for s in job.sides
    ]
    assert {each["job"] for each in rows if "skipped" in each} == COMPILED
    assert all(each["peak_memory_bytes"] > 0 for each in rows if "skipped" not in each)
    looked_at = [each for each in rows if each.get("unit") == "samples/s"]
    assert {
        (each["allocator_retries"], each["reserved_bytes"] > 0, each["host_seconds"] > 0) for each in looked_at
    } == {(0, True, True)}
    again = [each for each in found[1] if "skipped" not in each]
    assert [each for each in found[0] if "figure" in each] == again, "read, not measured again"
    assert again[0]["figure"].startswith(jobs()[next(name for name in jobs() if name not in COMPILED)].name)
