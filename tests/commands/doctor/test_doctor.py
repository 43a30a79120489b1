"""The doctor as a whole, on the CPU: its workers are forked here, and launched for real where the guide is tested."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import main_multi_gpu
from multigpu_cli.commands.doctor import bandwidth
from multigpu_cli.commands.doctor.doctor import add_nvml_facts, gather_facts, run_checks
from multigpu_cli.commands.doctor.system import Finding, format_findings
from multigpu_cli.commands.options import print_result
from multigpu_cli.config.sources import resolve
from multigpu_cli.distributed.placement import Placement
from multigpu_cli.errors import RequestError
from multigpu_cli.launch import WorkersFailed
from multigpu_cli.runtime.arithmetic import compute_checksums
from tests.support.fake_nvml import Nvml, a100
from tests.support.ranks import run_on_each_rank

FAMILIES = ("products", "convolutions", "reductions", "exponentials")
OWN = {"data": "tests.support.user_code:tensors", "model": "tests.support.user_code:net"}


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def workers(choice: Placement, function: Any) -> dict[int, Any]:
        return dict(enumerate(run_on_each_rank(choice.num_processes_to_launch, bandwidth.measure_allreduce)))

    monkeypatch.setattr(bandwidth, "run_in_workers", workers)
    monkeypatch.setattr(bandwidth, "_SIZES", {"cpu": (2**10, 2**12, 2**14)})
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("forked")
def test_without_a_gpu_the_rest_is_checked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main_multi_gpu.run(["doctor", "--json"]) == 0
    found = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)["findings"]}
    unchecked = {name for name, entry in found.items() if entry["verdict"] == "not checked"}
    assert {"GPUs", "host to GPU"} <= unchecked
    assert found["all-reduce (gloo)"]["verdict"] == "ok"
    assert found["all-reduce (gloo)"]["numbers"]["workers"] == 2
    checksums = found["arithmetic of cpu"]["numbers"]
    assert checksums["bf16"] == compute_checksums(torch.device("cpu"), "bf16"), "those of a run with --exact"
    assert checksums["off"].keys() == {f"checksum of {name}" for name in FAMILIES}
    assert "model" not in found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("forked")
def test_with_a_model_it_is_tried() -> None:
    found = {finding.name: finding for finding in run_checks(resolve(OWN, [], None), {})}
    assert found["model"].evidence.startswith(
        "tests.support.user_code:net, 179 parameters: --batch-size 32 runs on the CPU"
    )
    with pytest.raises(RequestError, match="--model"):
        run_checks(resolve(OWN | {"model": "tests.support.user_code:nothing"}, [], None), {})


@pytest.mark.usefixtures("forked")
def test_workers_that_fail_are_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def failing(choice: Placement, function: Any) -> None:
        raise WorkersFailed(1, "rank 1 was ended by SIGKILL")

    monkeypatch.setattr(bandwidth, "run_in_workers", failing)
    assert main_multi_gpu.run(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "fail  all-reduce" in said
    assert "rank 1 was ended by SIGKILL" in said


def test_what_nvml_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    bare = gather_facts({"CUDA_VISIBLE_DEVICES": "3"})
    assert (bare.no_nvml, bare.hidden) == ("nvidia-ml-py is not installed", "3")
    four = add_nvml_facts(bare, Nvml([a100()] * 4))
    assert (len(four.gpus), len(four.links), four.driver_cuda) == (4, 6, (12, 4))


@pytest.mark.parametrize(
    ("finding", "shown"),
    [
        (Finding("one", "ok", "fine"), ["ok    one  fine", "1 ok, 0 warnings, 0 failures, 0 not checked"]),
        (
            Finding("one", "warn", "a\nb", "mend"),
            ["warn  one  a", "           b", "           fix: mend", "0 ok, 1 warning, 0 failures, 0 not checked"],
        ),
        (
            Finding("one", "not checked", "no GPU"),
            ["-     one  not checked: no GPU", "0 ok, 0 warnings, 0 failures, 1 not checked"],
        ),
    ],
)
def test_how_it_is_shown(finding: Finding, shown: list[str]) -> None:
    assert list(format_findings([finding])) == shown


def test_json_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    print_result({"findings": [Finding("one", "ok", "fine", "", {"x": 1.5})]}, [], as_json=True)
    expected: Any = {"name": "one", "verdict": "ok", "evidence": "fine", "fix": "", "numbers": {"x": 1.5}}
    assert json.loads(capsys.readouterr().out) == {"findings": [expected]}
